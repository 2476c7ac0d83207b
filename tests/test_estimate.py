import pytest

from modpo.estimate import Estimate, Phase


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def made(**phases):
    clock = Clock()
    return Estimate({name: Phase(name, *given) for name, given in phases.items()}, clock), clock


def test_nothing_measured_nothing_said():
    estimate, _ = made(warm=(4, 1.0), train=(40, 3.0))
    assert estimate.seconds_left is None


def test_a_phase_not_yet_begun_is_guessed_by_its_cost():
    estimate, clock = made(warm=(4, 1.0), train=(40, 3.0))
    clock.now += 2
    estimate.advance("warm")
    # three more of 2 s, and forty that cost three times as much
    assert estimate.seconds_left == pytest.approx(3 * 2 + 40 * 6)


def test_a_phase_that_was_measured_goes_by_its_own_rate():
    estimate, clock = made(warm=(1, 1.0), train=(10, 3.0))
    clock.now += 2
    estimate.advance("warm")
    clock.now += 20
    estimate.advance("train", 4)
    assert estimate.seconds_left == pytest.approx(6 * 5)


def test_a_first_unit_that_took_the_time_of_many_is_not_believed_alone():
    estimate, clock = made(warm=(10, 1.0), train=(100, 2.0))
    clock.now += 10
    estimate.advance("warm", 10)  # 1 s each
    clock.now += 20
    estimate.advance("train")
    # 30 s for a cost of 12; a twentieth of 100 is trusted, so four units are still guessed at 2 * 30/12
    assert estimate.seconds_left == pytest.approx(99 * (20 + 4 * 5) / 5)


def test_phases_that_take_turns_share_what_is_known():
    estimate, clock = made(train=(10, 1.0), validate=(2, 4.0), last=(1, 2.0))
    clock.now += 3
    estimate.advance("train", 3)  # 1 s each
    clock.now += 9
    estimate.advance("validate")  # 9 s instead of 4
    # 12 s for a cost of 3 + 4: `last` is guessed at twice 12/7
    assert estimate.seconds_left == pytest.approx(7 * 1 + 1 * 9 + 2 * 12 / 7)


def test_what_is_done_and_overdone_leaves_nothing():
    estimate, clock = made(train=(2, 1.0))
    clock.now += 5
    estimate.advance("train", 3)
    assert estimate.seconds_left == 0.0


def test_time_before_the_estimate_was_made_is_nobodys():
    clock = Clock()
    estimate = Estimate({"train": Phase("train", 3, 1.0)}, clock)
    clock.now += 1
    estimate.advance("train")
    assert estimate.phases["train"].seconds == 1.0
