"""Settings from `QERL_*` variables, read once. The defaults are the embedded stack: one machine, one folder."""

import sys
from functools import cache
from pathlib import Path

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """The service's own settings; what a run does is `TrainConfig`."""

    model_config = SettingsConfigDict(env_prefix="QERL_", use_attribute_docstrings=True, frozen=True)

    home: Path = Path(".qerl")
    """Folder of everything that the defaults below put on this machine."""
    database_url: str = ""
    """SQLAlchemy URL; empty: `home/qerl.db` (SQLite)."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    """The broker."""
    store_url: str = ""
    """fsspec URL of uploads and artifacts; empty: `home/store`."""
    scratch: Path = Path()
    """Folder of running jobs' checkpoints and logs; empty: `home/jobs`."""
    cache: Path = Path()
    """Folder of converted and quantized base models; empty: `home/cache`."""
    models_file: Path = Path("models.toml")
    """The allow-list of base models."""
    host: str = "127.0.0.1"
    """Where the API listens. Anything but loopback is refused until there is an API key."""
    port: int = Field(8000, ge=0, le=65535)
    """0 takes a free one."""
    admin_key: SecretStr | None = Field(None, min_length=24, max_length=512)
    """A key with the admin scope, for those who set up the service by variables: a long random text."""
    requests_per_minute: int | None = Field(None, ge=1)
    """So many a key may send, over all API processes; None: any number."""
    private_hosts: tuple[str, ...] = ()
    """Hosts that webhooks may be sent to though they are not on the public internet, also without TLS. As JSON in the
    environment."""
    organization: str = "local"
    """The third part of a fine-tuned model's name."""
    max_upload_bytes: int = Field(512 * 1024**2, gt=0)
    heartbeat_s: float = Field(1.0, gt=0)
    """Between a lease's heartbeats; also how soon a cancel is seen."""
    lease_timeout_s: float = Field(30.0, gt=0)
    """A running job without a heartbeat for so long has lost its worker."""
    sweep_s: float = Field(15.0, gt=0)
    """Between sweeps; a queued job not rung for so long is rung again."""
    max_attempts: int = Field(3, ge=1)
    """A job that lost its worker so often is failed."""
    stop_grace_s: float = Field(120.0, ge=0)
    """How long a run may finish its step and checkpoint when its worker shuts down."""
    run_command: tuple[str, ...] = Field((sys.executable, "-m", "worker.run"), min_length=1)
    """What runs an attempt, before the job's id and the attempt's number: put `nice` before it, or the interpreter of
    another environment, since vLLM wants its own. As JSON in the environment."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: dict[str, object]) -> dict[str, object]:
        home = Path(str(values.get("home", ".qerl"))).resolve()
        filled = {
            "home": home,
            "database_url": values.get("database_url") or f"sqlite:///{home / 'qerl.db'}",
            "store_url": values.get("store_url") or f"file://{home / 'store'}",
            "scratch": values.get("scratch") or home / "jobs",
            "cache": values.get("cache") or home / "cache",
        }
        return {**values, **filled}


@cache
def get_settings() -> Settings:
    """This process's settings."""
    return Settings()
