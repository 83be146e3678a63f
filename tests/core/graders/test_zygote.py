import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl_core.graders import zygote
from qerl_core.graders.wire import Frames, pack, unpack

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("module", ["zygote", "runner", "check"])
def test_nothing_heavy_is_imported(module):
    heavy = {"torch", "transformers", "numpy", "sympy", "math_verify", "app"}
    if module == "zygote":
        heavy |= {"pydantic", "dataclasses", "inspect", "socket", "subprocess", "pathlib", "shutil"}
    code = f"import sys, qerl_core.graders.{module}; print(*sorted({heavy!r} & set(sys.modules)))"

    found = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    if module != "zygote":  # pydantic is no part of the standard library
        found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert (found.stdout, found.stderr) == ("\n", "")


def test_children_are_found_with_and_without_the_kernel_s_list():
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert child.pid in zygote.children()
            assert zygote.children_by_scan() == zygote.children()
        finally:
            child.kill()


def test_a_folder_of_any_shape_is_removed_or_left_without_a_word(tmp_path):
    folder = tmp_path / "call"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "link").symlink_to(ROOT)
    (folder / "a" / "file").write_text("x")
    (folder / "a").chmod(0o500)

    zygote.remove(str(folder))
    zygote.remove(str(folder))

    assert not folder.exists()
    assert (ROOT / "pyproject.toml").exists()


@pytest.mark.parametrize(
    "message",
    [
        {"reward": 1.0},
        {"nonce": "m", "reward": 1.0},
        {"nonce": "n", "reward": 1},
        {"nonce": "n", "reward": True},
        {"nonce": "n", "reward": None},
        {"nonce": "n", "reward": float("nan")},
        {"nonce": "n", "reward": float("inf")},
        {"nonce": "n", "reward": "1"},
        {"nonce": ["n"], "reward": 1.0},
    ],
)
def test_a_reply_without_nonce_or_number_is_none(message):
    with pytest.raises(ValueError, match=r"nonce|reward"):
        zygote.checked(message, nonce="n")


def test_a_reply_is_cut_to_what_belongs_in_it():
    found = zygote.checked({"nonce": "n", "error_type": "x" * 100, "error": ["y" * 20_000], "id": 7}, nonce="n")

    assert set(found) == {"error_type", "error"}
    assert len(found["error"]) == zygote.MAX_ERROR_CHARS
    assert zygote.checked({"nonce": "n", "reward": 0.5, "id": 7}, nonce="n") == {"reward": 0.5}


@given(st.lists(st.dictionaries(st.text(), st.text() | st.integers()), max_size=5), st.lists(st.integers(1, 40)))
def test_messages_come_out_as_they_went_in_however_they_are_cut(messages, cuts):
    data, frames, found = b"".join(map(pack, messages)), Frames(max_bytes=1 << 20), []
    while data:
        size = cuts.pop() if cuts else len(data)
        found += [unpack(body) for body in frames.feed(data[:size])]
        data = data[size:]

    assert found == messages


def test_a_message_too_large_is_refused_before_it_is_there():
    with pytest.raises(ValueError, match="bytes"):
        list(Frames(max_bytes=10).feed(b"\x00\x00\x00\x0b"))
