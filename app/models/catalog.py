"""The operator's allow-list of base models (`models.toml`): what a job may name, and how far it may go."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from app.settings import get_settings
from qerl_core.config import ModelConfig, RoundingMethod

PACKAGE = "package:"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class BadModelsFile(Exception):
    """Why the models file cannot be used, in a line. It names the file, not its folder."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Limits(_Entry):
    """How far a job on this model may go."""

    context_tokens: int = Field(ge=2)
    """Prompt and completion together."""
    max_rank: int = Field(128, ge=1, le=512)
    max_group_size: int = Field(64, ge=2)
    max_batch_size: int = Field(256, ge=1)
    max_steps: int = Field(10_000, ge=1)


class CatalogModel(_Entry):
    """A base model that jobs may name."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=200)
    """The name in the API."""
    source: str = Field(min_length=1)
    """A folder (relative ones count from the models file), a hub id, or `package:NAME`."""
    gguf_file: str | None = None
    """The file inside `source` if the weights are GGUF."""
    revision: str | None = None
    """The hub commit; wanted for a hub id."""
    hub_id: str | None = None
    """Where others find the same base; a hub id as `source` is its own."""
    license: str | None = None
    quantization: Literal["nvfp4", "none"] = "nvfp4"
    """How the frozen weights are held unless a job says otherwise."""
    limits: Limits

    @model_validator(mode="after")
    def _pins_a_revision(self) -> Self:
        local = self.source.startswith(PACKAGE) or Path(self.source).is_absolute()
        if not local and not HUB_ID.fullmatch(self.source):
            raise ValueError(f"source {self.source!r} is no folder that exists, no owner/name of the hub, no package:")
        if not local and self.revision is None:
            raise ValueError(f"source {self.source!r} is a hub id: pin its revision")
        if local and self.revision is not None:
            raise ValueError("revision has no effect: source is no hub id")
        return self

    def config(
        self,
        quantization: Literal["nvfp4", "none"] | None,
        method: RoundingMethod | None = None,
    ) -> ModelConfig:
        """The model's part of a run's config."""
        hub = None if self.revision is None else self.source
        return ModelConfig(
            id=self.id, source=self.source, revision=self.revision, gguf_file=self.gguf_file,
            hub_id=self.hub_id or hub, quantization=quantization or self.quantization,
            quantization_method=method or "auto",
        )  # fmt: skip


class _ModelsFile(_Entry):
    models: tuple[CatalogModel, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _ids_differ(self) -> Self:
        ids = [model.id for model in self.models]
        if twice := sorted({name for name in ids if ids.count(name) > 1}):
            raise ValueError(f"more than one model has the id {', '.join(twice)}")
        return self


@dataclass(frozen=True, slots=True)
class Catalog:
    """The models of a file."""

    models: tuple[CatalogModel, ...]
    created: int
    """When the file was last changed."""

    def ids(self) -> list[str]:
        """The allowed names."""
        return [model.id for model in self.models]

    def find(self, model_id: str) -> CatalogModel | None:
        """The model of a name, if it is allowed."""
        return next((model for model in self.models if model.id == model_id), None)


def read(path: Path) -> Catalog:
    """Read a models file. BadModelsFile in one line if it is missing or faulty."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        created = int(path.stat().st_mtime)
    except OSError as error:
        raise BadModelsFile(f"{path.name}: {error.strerror}; QERL_MODELS_FILE names the list of base models") from error
    except ValueError as error:
        raise BadModelsFile(f"{path.name}: not TOML: {error}") from error
    try:
        return Catalog(_ModelsFile.model_validate(_with_folders(raw, path.resolve().parent)).models, created)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        reason = fault["msg"].removeprefix("Value error, ")
        raise BadModelsFile(f"{path.name}: {f'{where}: ' if where else ''}{reason}") from error


def _with_folders(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same with folders as absolute paths: the worker has a working directory of its own."""

    def located(entry: Any) -> Any:
        source = entry.get("source") if isinstance(entry, dict) else None
        if not isinstance(source, str) or source.startswith(PACKAGE):
            return entry
        path = folder / Path(source).expanduser()
        named_as_folder = source.startswith((".", "~", "/"))
        return {**entry, "source": str(path.resolve())} if named_as_folder or path.is_dir() else entry

    models = raw.get("models")
    return {**raw, "models": [located(entry) for entry in models]} if isinstance(models, list) else raw


@cache
def _loaded(path: Path) -> Catalog:
    return read(path)


def get_catalog() -> Catalog:
    """This process's catalog, read once. BadModelsFile if it cannot be."""
    return _loaded(get_settings().models_file.absolute())
