"""Fixtures for every layer. They start nothing, and import nothing heavy, until a test asks."""

import pytest


@pytest.fixture
def redis_server(tmp_path):
    """A running Redis server of the test's own."""
    from tests.live import RedisServer

    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def postgres_server():
    """A running PostgreSQL server; `create_database()` gives a test one of its own."""
    from tests.live import PostgresServer

    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request, tmp_path):
    """An empty database, of each kind in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'qerl.db'}"
    return request.getfixturevalue("postgres_server").create_database()


@pytest.fixture
def settings(tmp_path):
    """This process's settings: everything in a folder of the test's own, no broker, short times."""
    from app.settings import Settings
    from tests.live import free_port, settings_of_process

    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    made = Settings(home=tmp_path / "home", redis_url=nowhere, heartbeat_s=0.2, lease_timeout_s=2.0, sweep_s=0.5)
    made.home.mkdir()
    with settings_of_process(made) as settings:
        yield settings


@pytest.fixture
def database(settings):
    """The tables, empty, in the database of `settings`."""
    from app.migrate import upgrade

    upgrade(settings.database_url)
    return settings.database_url
