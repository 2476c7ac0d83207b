import pytest

from modpo.estimate import Estimate, Phase
from modpo.optimizers.progress import ProgressWatch, clock


class Sampler:
    sampled_tokens = 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (29, "29 s"), (40, "1 min"), (59.6 * 60, "1 h 00 min"), (80 * 60, "1 h 20 min"), (300, "5 min")],
)
def test_a_span_of_time_reads_well(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def watched(*, quiet: bool = False, limit_s: float | None = None) -> ProgressWatch:
    times = iter(range(0, 1000, 10))
    phases = {"evaluate": Phase("evaluate", 20, 1.0), "train": Phase("train", 30, 2.0)}
    return ProgressWatch(Estimate(phases, clock=lambda: float(next(times))), Sampler(), quiet=quiet, limit_s=limit_s)


def test_numbers_speed_and_time_left_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with watched() as watch:
        watch.advance("evaluate", 20)
        watch.show(step=3, reward=0.25, parse_failures=0.5)
    out, err = capsys.readouterr()
    # 20 units took 10 s; 30 units of twice the cost are left
    assert "20/50 step 3: reward 0.25, parse failures 0.50, 0 tokens/s, about 30 s left" in err
    assert out == ""


def test_a_time_limit_bounds_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with watched(limit_s=0.0) as watch:
        watch.advance("evaluate", 20)
        watch.show(step=3)
    assert "about 1 s left" in capsys.readouterr().err  # and not 30


def test_a_few_units_are_not_trusted_with_a_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    with watched() as watch:
        watch.advance("evaluate", 3)
        watch.show(reward=1.0)
    assert "time left unknown yet" in capsys.readouterr().err


def test_nothing_is_shown_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with watched(quiet=True) as watch:
        watch.advance("evaluate", 10)
        watch.show(before=0.5)
    assert capsys.readouterr() == ("", "")


def test_more_units_than_planned_do_not_break_the_count(capsys: pytest.CaptureFixture[str]) -> None:
    with watched() as watch:
        watch.advance("evaluate", 25)
        watch.show(before=0.5)
    assert "25/55 before" in capsys.readouterr().err
