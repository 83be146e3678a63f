import multiprocessing
import time

import pytest

from qerl_core.folders import lone_maker, published


def fill(target, log):
    with lone_maker(target) as is_wanted:
        if is_wanted:
            with log.open("a") as file:
                file.write("made\n")
            with published(target) as partial:
                time.sleep(0.3)
                (partial / "whole").write_text("yes")


def test_of_several_makers_one_works_and_the_others_wait(tmp_path):
    context = multiprocessing.get_context("spawn")
    target, log = tmp_path / "target", tmp_path / "log"
    makers = [context.Process(target=fill, args=(target, log)) for _ in range(3)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()

    assert log.read_text() == "made\n"
    assert (target / "whole").read_text() == "yes"


def test_what_was_interrupted_is_not_there(tmp_path):
    target = tmp_path / "target"

    def interrupted():
        with published(target) as partial:
            (partial / "half").write_text("")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert not list(tmp_path.iterdir())


def test_what_a_killed_maker_left_is_thrown_away(tmp_path):
    target = tmp_path / "target"
    abandoned = tmp_path / ".target.0123.partial"
    abandoned.mkdir()

    with lone_maker(target) as is_wanted:
        assert is_wanted

    assert not abandoned.exists()


def test_what_is_there_is_not_wanted_again(tmp_path):
    with published(tmp_path / "target") as partial:
        (partial / "whole").write_text("yes")

    with lone_maker(tmp_path / "target") as is_wanted:
        assert not is_wanted
