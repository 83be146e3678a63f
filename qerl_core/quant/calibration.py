"""Calibrated rounding of a whole decoder, a layer at a time: memory is that of one layer, never of the model.

Calibration text goes through the decoder twice, side by side: as it is unquantized, and through the layers that are
rounded already. A linear will meet inputs of the second kind, X [T, K], and should answer them as it does those of the
first, X + D (asymmetric calibration, arXiv:2504.02692). Where its answer is added to the hidden states, as at the end
of attention and of the MLP, it can make good for what these lack, too, R [T, N]; and there a token's errors count in
parts of its hidden state's size, by which the norms that follow divide it. On the calibration text the matrix that
comes closest to both is

    W' = W + (W D^T + R^T) X (X^T X)^-1,

so W' is what is rounded, and each layer makes good for those before it.

A layer's linears are rounded in the order in which the model lists them, those that engines fuse together, each with
the inputs that the ones before, rounded, give it. All is computed in float32.

T = tokens, D = hidden size, N = out features, K = in features.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qerl_core.errors import BadCheckpoint
from qerl_core.quant.gptq import quantize_calibrated
from qerl_core.quant.linear import quantizable_linears, scale_groups
from qerl_core.quant.nvfp4 import NVFP4Weight

_INSTEAD = "choose a rounding method without calibration"
Text = Sequence[Sequence[int]]
"""Calibration text: sequences of token ids."""
RIDGES = (10.0, 1.0, 0.1, 0.01)
"""Tried in the regression of what is missing, as parts of the mean diagonal, until the next foretells less."""
_TINY = 1e-6
Load = Callable[[str, nn.Module], None]
"""Gives a module of the model, which has this name there, its unquantized weights in float32."""
Rounded = tuple[dict[str, Tensor], dict[str, NVFP4Weight], Tensor]
"""A fused group's plain weights and rounded ones by the linear's name, and the encode scale that they share."""


def round_layers(model: PreTrainedModel, text: Text, *, load: Load, device: torch.device | str) -> Iterator[Rounded]:
    """Round the linears of a model's decoder, a fused group at a time, for the inputs that `text` brings them.

    The model comes without weights, on the meta device, and is left so: a layer has its own while it is worked on.
    Raises ValueError for text without tokens, BadCheckpoint for a model that cannot be walked, and with the name of
    a linear that cannot be rounded.
    """
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise BadCheckpoint(f"{type(decoder).__name__} has no list of layers to calibrate; {_INSTEAD}")
    names = {module: name for name, module in model.named_modules()}
    linears = quantizable_linears(model)
    for name in linears:
        if not name.startswith(f"{names[layers]}."):
            raise BadCheckpoint(f"{name} is in none of the decoder's layers, so it cannot be calibrated; {_INSTEAD}")
    others = [module for module in decoder.children() if module is not layers]
    for module in others:
        load(names[module], module)
    plain = _HiddenStates(decoder, text, device)
    rounded = plain.copy()
    for module in others:
        module.to("meta")
    for layer in layers:
        load(names[layer], layer)
        inside = {name: linear for name, linear in linears.items() if name.startswith(f"{names[layer]}.")}
        yield from _round_layer(layer, inside, plain, rounded)
        layer.to("meta")


@torch.no_grad()
def _round_layer(
    layer: nn.Module, linears: Mapping[str, nn.Linear], plain: "_HiddenStates", rounded: "_HiddenStates"
) -> Iterator[Rounded]:
    """Round a layer's linears, where they are, and take both kinds of hidden states through it."""
    groups = scale_groups(linears)
    rest = {group: [linears[name] for later in groups[place:] for name in later] for place, group in enumerate(groups)}
    # What an answer is added to is what the layer puts out while this linear and those after it answer zeros.
    beside = {group: plain.run(layer, silent=rest[group]) for group in groups if plain.adds(layer, rest[group])}
    with ExitStack() as stack:
        wanted = {group: stack.enter_context(_inputs_of(linears[group[0]])) for group in groups}
        plain.advance(layer)
    for group in groups:
        is_added = group in beside
        with _inputs_of(linears[group[0]], stop=not is_added) as inputs:
            outputs = rounded.run(layer, silent=rest[group] if is_added else ())
        weights = {name: linears[name].weight.detach() for name in group}
        weight_NK = torch.cat(list(weights.values()))
        lacking = [each - other for each, other in zip(beside.pop(group, ()), outputs, strict=True)]
        sizes = plain.sizes() if is_added else None
        hessian_2KK, missing_2NK = _moments(weight_NK, inputs, wanted.pop(group), lacking, sizes)
        inputs.clear()  # those of a wide linear are as large as all else
        target_NK = weight_NK + _shift(hessian_2KK, missing_2NK)
        targets = torch.split(target_NK, [len(weight) for weight in weights.values()])
        made, encode = quantize_calibrated(dict(zip(group, targets, strict=True)), hessian_2KK.sum(0))
        yield weights, made, encode
        for name in group:
            linears[name].weight = nn.Parameter(made[name].decode(torch.float32), requires_grad=False)
    rounded.advance(layer)


def _moments(
    weight_NK: Tensor,
    inputs: Sequence[Tensor],
    wanted: Sequence[Tensor],
    lacking: Sequence[Tensor],
    sizes: Sequence[Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """X^T X [2, K, K] and what is missing of W X, (W D^T + R^T) X [2, N, K], a token, of each half of the sequences.

    A token's errors count in parts of its size, if there are sizes [T, 1].
    """
    num_rows, num_cols = weight_NK.shape
    hessian_2KK = torch.zeros(2, num_cols, num_cols, device=weight_NK.device)
    missing_2NK = torch.zeros(2, num_rows, num_cols, device=weight_NK.device)
    drift_2KK = torch.zeros_like(hessian_2KK)
    num_tokens = sum(len(each) for each in inputs)
    # Where a layer routes its tokens, the two kinds need not be of the same ones.
    is_paired = [each.shape for each in inputs] == [each.shape for each in wanted]
    for place, input_TK in enumerate(inputs):
        counted_TK = input_TK / sizes[place].square() if is_paired and sizes else input_TK
        hessian_2KK[place % 2].addmm_(input_TK.T, counted_TK, alpha=1 / num_tokens)
        if is_paired:
            drift_2KK[place % 2].addmm_((wanted[place] - input_TK).T, counted_TK, alpha=1 / num_tokens)
        if is_paired and lacking:
            missing_2NK[place % 2].addmm_(lacking[place].flatten(0, -2).T, counted_TK, alpha=1 / num_tokens)
    return hessian_2KK, missing_2NK.baddbmm_(weight_NK.expand(2, -1, -1), drift_2KK)


def _shift(hessian_2KK: Tensor, missing_2NK: Tensor) -> Tensor:
    """What to add to the weights [N, K]: M (X^T X + ridge)^-1, for as much of M as is more than the text's accident.

    The ridge is that by which each half of the text foretells best what is missing in the other; no shift if none
    does, as may be with few tokens for many inputs.
    """
    best, ridge = 0.0, None
    for tried in RIDGES:
        gain = 0.0
        for here, there in ((0, 1), (1, 0)):
            shift_NK = _solve(missing_2NK[here], hessian_2KK[here], tried)
            gain += ((2 * missing_2NK[there] - shift_NK @ hessian_2KK[there]) * shift_NK).sum().item()
        if not gain > best:
            break
        best, ridge = gain, tried
    if ridge is None:
        return torch.zeros_like(missing_2NK[0])
    return _solve(missing_2NK.sum(0), hessian_2KK.sum(0), ridge)


def _solve(missing_NK: Tensor, hessian_KK: Tensor, ridge: float) -> Tensor:
    """M (H + ridge * mean diagonal)^-1; zeros if that cannot be had."""
    damped_KK = hessian_KK.double()
    diagonal_K = damped_KK.diagonal()
    diagonal_K += ridge * diagonal_K.mean()
    lower_KK, failed = torch.linalg.cholesky_ex(damped_KK)
    if failed:
        return torch.zeros_like(missing_NK)
    return torch.cholesky_solve(missing_NK.T.double(), lower_KK).T.float()


class _Reached(Exception):
    """The call has come as far as it was wanted to."""


@contextmanager
def _inputs_of(linear: nn.Linear, *, stop: bool = False) -> Iterator[list[Tensor]]:
    """What a linear is called with meanwhile, [T, K] a call; `stop` ends the layer's call there."""
    found: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        found.append(args[0].detach().flatten(0, -2))
        if stop:
            raise _Reached

    hook = linear.register_forward_pre_hook(keep)
    try:
        yield found
    finally:
        hook.remove()


@contextmanager
def _silenced(linears: Sequence[nn.Linear]) -> Iterator[None]:
    """Meanwhile the linears answer zeros."""
    for linear in linears:
        linear.forward = partial(_zeros, linear.out_features)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for linear in linears:
            del linear.forward


def _zeros(num_features: int, input: Tensor) -> Tensor:
    return input.new_zeros(*input.shape[:-1], num_features)


class _HiddenStates:
    """Token sequences on their way through a decoder: the hidden states [1, T, D] before the layer that is next."""

    def __init__(self, decoder: nn.Module, text: Text, device: torch.device | str) -> None:
        self._number = 0
        self._states: list[Tensor] = []
        self._calls: list[list[dict[str, Any]]] = []  # by sequence, by layer
        for sequence in text:
            if len(sequence):
                self._start(decoder, torch.tensor([list(sequence)], device=device))
        if not self._states:
            raise ValueError("calibration needs at least one token")

    def copy(self) -> "_HiddenStates":
        """The same sequences at the same place, to go another way."""
        twin = copy.copy(self)
        twin._states = list(self._states)
        return twin

    def run(self, layer: nn.Module, *, silent: Sequence[nn.Linear] = ()) -> list[Tensor]:
        """The layer's output for each sequence, while some of its linears answer zeros; none where a hook stops it."""
        outputs = []
        with _silenced(silent):
            for place in range(len(self._states)):
                with suppress(_Reached):
                    outputs.append(self._through(layer, place))
        return outputs

    def advance(self, layer: nn.Module) -> None:
        """Take all sequences through the layer that is next."""
        for place in range(len(self._states)):
            self._states[place] = self._through(layer, place)
        self._number += 1

    def sizes(self) -> list[Tensor]:
        """Root mean square of each token's hidden state, [T, 1]: the norms that follow divide by it."""
        return [states_1TD[0].square().mean(-1, keepdim=True).sqrt().clamp(min=_TINY) for states_1TD in self._states]

    def adds(self, layer: nn.Module, rest: Sequence[nn.Linear]) -> bool:
        """Whether the first linear's answer reaches the layer's output as it is, those after it answering zeros."""
        with _silenced(rest), _inputs_of(rest[0]) as inputs:
            without_1TD = self._through(layer, 0)
        if len(inputs) != 1:
            return False
        with _silenced(rest[1:]):
            with_1TD = self._through(layer, 0)
        answer_TN = rest[0](inputs[0])
        if answer_TN.shape != with_1TD.shape[1:]:
            return False
        off_T = (with_1TD - without_1TD - answer_TN)[0].norm(dim=-1)
        return bool((off_T <= 1e-2 * answer_TN.norm(dim=-1) + 1e-5 * without_1TD[0].norm(dim=-1)).all())

    def _through(self, layer: nn.Module, place: int) -> Tensor:
        out = layer(self._states[place], **self._calls[place][self._number])
        hidden_1TD: Tensor = out[0] if isinstance(out, tuple) else out
        return hidden_1TD

    def _start(self, decoder: nn.Module, ids_1T: Tensor) -> None:
        """Embed a sequence, and learn what the decoder hands its layers beside the hidden states."""
        layers: nn.ModuleList = decoder.layers  # type: ignore[assignment]
        calls: list[dict[str, Any]] = []

        def record(hidden_1TD: Tensor, **kwargs: Any) -> Tensor:
            if not calls:
                self._states.append(hidden_1TD)
            calls.append(kwargs)
            if len(calls) == len(layers):
                raise _Reached
            return hidden_1TD

        for layer in layers:
            layer.forward = record
        try:
            with suppress(_Reached):
                decoder(input_ids=ids_1T, use_cache=False)
        finally:
            for layer in layers:
                del layer.forward
        self._calls.append(calls)
