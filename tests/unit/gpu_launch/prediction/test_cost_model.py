"""The model of a step: what is sent when, which cards are best, and which mode `--comm auto` takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_launch.prediction import cost_model
from gpu_launch.training.comm_modes import LOCAL_PERIOD, CommMode
from tests.support.launch.measured import CARD, NETWORK, PROFILE, build_bench


def test_ring_all_reduce_has_the_time_of_its_turns_and_bytes():
    """Three ranks: four turns, and 4/3 of the bytes."""
    assert cost_model.compute_allreduce_s(NETWORK, 3, 67.2e6) == pytest.approx(4 * 0.001 + 4 / 3 * 67.2e6 / 312.5e6)
    assert cost_model.compute_allreduce_s(NETWORK, 2, 67.2e6) == pytest.approx(2 * 0.001 + 67.2e6 / 312.5e6)


def test_one_card_communicates_nothing():
    """Whatever the buckets are."""
    step = cost_model.predict_step(PROFILE, build_bench(1e13), (0,), CommMode.EXACT)
    assert (step.step_s, step.exposed_s, step.overlapped_s) == (pytest.approx(0.33), 0, 0)


def test_first_bucket_is_sent_next_to_the_computation():
    """Each takes 82 ms. The first is over before the second is ready; all of that one extends the step."""
    step = cost_model.predict_step(PROFILE, build_bench(1e13, 1e13), (0, 1), CommMode.EXACT)
    assert step.exposed_s == pytest.approx(0.082)
    assert step.overlapped_s == pytest.approx(0.082)
    assert step.step_s == pytest.approx(0.33 + 0.082)


def test_slow_network_delays_the_second_bucket():
    """At a tenth of the speed each takes 802 ms: the first is there 702 ms after the last gradient, then the second."""
    slow = replace(NETWORK, bytes_s=NETWORK.bytes_s / 10)
    step = cost_model.predict_step(PROFILE, build_bench(1e13, 1e13, network=slow), (0, 1), CommMode.EXACT)
    assert step.exposed_s == pytest.approx(0.2 + 2 * 0.802 - 0.3)


def test_compressed_gradients_are_smaller_and_take_time_to_compress():
    """bf16 sends half; powersgd a hundredth, in three all-reduces, which have the latency of three."""
    bench = build_bench(1e13, 1e13)
    half = cost_model.predict_step(PROFILE, bench, (0, 1), CommMode.BF16)
    assert half.exposed_s == pytest.approx(0.002 + 12.5e6 / 312.5e6)
    assert half.compress_s == pytest.approx(0.002)
    small = cost_model.predict_step(PROFILE, bench, (0, 1), CommMode.POWERSGD)
    assert small.exposed_s == pytest.approx(3 * 0.002 + 0.25e6 / 312.5e6)


def test_bandwidth_of_bfloat16_is_its_own():
    """gloo adds up bfloat16 on the CPU, more slowly than float32."""
    bench = build_bench(1e13, 1e13, network=replace(NETWORK, bf16_bytes_s=NETWORK.bytes_s / 4))
    step = cost_model.predict_step(PROFILE, bench, (0, 1), CommMode.BF16)
    assert step.exposed_s == pytest.approx(0.002 + 12.5e6 / 78.125e6 + max(0.0, 0.2 + 0.001 + 0.162 - 0.302))


def test_local_steps_average_all_parameters_from_time_to_time():
    """Nothing of that is next to the computation."""
    step = cost_model.predict_step(PROFILE, build_bench(1e13, 1e13), (0, 1), CommMode.LOCAL)
    assert step.exposed_s == pytest.approx((0.002 + 50e6 / 312.5e6) / LOCAL_PERIOD)
    assert step.overlapped_s == 0


def test_slowest_card_sets_the_pace():
    """With half the speed, computation takes twice as long; a tenth more or less counts as equal."""
    bench = build_bench(1e13, 0.5e13, 0.9e13)
    assert cost_model.predict_step(PROFILE, bench, (0, 1), CommMode.EXACT).compute_s == pytest.approx(0.6)
    assert cost_model.predict_step(PROFILE, bench, (0, 2), CommMode.EXACT).compute_s == pytest.approx(0.3)


def test_speed_of_the_profiled_card_is_that_of_the_bench():
    """Both speeds are of the same minute. A card that the bench lacks counts with its own."""
    bench = build_bench(1e13, 0.5e13)
    hot = replace(PROFILE, card=replace(CARD, flops=0.2e13))
    assert cost_model.predict_step(hot, bench, (0, 1), CommMode.EXACT).compute_s == pytest.approx(0.6)
    other = replace(hot, card=replace(hot.card, node="rig9"))
    assert cost_model.predict_step(other, bench, (0,), CommMode.EXACT).compute_s == pytest.approx(0.3 * 0.2)


def test_whole_gang_has_its_own_figures_and_a_part_those_of_its_slowest_link():
    """A pair that was not measured is taken to be like the slowest."""
    gang = replace(NETWORK, bytes_s=1e8)
    bench = build_bench(1e13, 1e13, 1e13, gang=gang)
    slow = replace(bench.links[1], network=replace(NETWORK, bytes_s=2e8, latency_s=0.002))
    bench = replace(bench, links=(bench.links[0], slow, bench.links[2]))
    assert cost_model.find_network(bench, (0, 1, 2)) == gang
    assert cost_model.find_network(bench, (0, 1)) == NETWORK
    assert cost_model.find_network(bench, (0, 2)) == slow.network
    assert cost_model.find_network(replace(bench, links=(slow,)), (0, 1)) == slow.network


def test_best_set_of_each_number_leaves_slow_cards_out():
    """Two of three are the fast ones."""
    steps = cost_model.predict_all(PROFILE, build_bench(0.3e13, 1e13, 1e13))
    assert [step.cards for step in steps if step.mode is CommMode.EXACT] == [(1,), (1, 2), (0, 1, 2)]
    assert [step.mode for step in steps if len(step.cards) == 2] == list(CommMode)


def test_cards_with_too_little_memory_take_no_part():
    """None are left where the model fits no card."""
    bench = build_bench(1e13, 1e13)
    bench = replace(bench, cards=(bench.cards[0], replace(bench.cards[1], memory_mib=8_000)))
    assert {step.cards for step in cost_model.predict_all(PROFILE, bench)} == {(0,)}
    assert cost_model.predict_all(replace(PROFILE, peak_memory_mib=40_000), bench) == []


def test_many_cards_are_compared_by_their_speed_only():
    """Not all 2 to the 12th sets."""
    steps = cost_model.predict_all(PROFILE, build_bench(*(1e13 * (1 + rank) for rank in range(12))))
    exact = [step for step in steps if step.mode is CommMode.EXACT]
    assert exact[1].cards == (10, 11)
    assert len(exact) == 12


@pytest.mark.parametrize(
    ("gbit_per_s", "mode"), [(100, CommMode.EXACT), (2.5, CommMode.POWERSGD), (0.1, CommMode.POWERSGD)]
)
def test_automatic_mode_changes_little_where_little_is_gained(gbit_per_s, mode):
    """A mode that changes more must make a step shorter by a tenth; `local` is never taken."""
    network = replace(NETWORK, latency_s=1e-5, bytes_s=gbit_per_s / 8 * 1e9, bf16_bytes_s=gbit_per_s / 8 * 1e9)
    steps = cost_model.predict_all(PROFILE, build_bench(1e13, 1e13, network=network))
    assert cost_model.choose_mode(steps, 2) is mode
    assert cost_model.choose_mode(steps, 1) is CommMode.EXACT
    assert cost_model.choose_mode(steps, 3) is None
