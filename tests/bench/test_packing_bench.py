"""The packing bench runs, and its workloads are what their names say."""

from bench.packing import SCALES, bench, few_shot, heavy_tail, ways


def test_the_quick_bench_gives_figures_for_each_way():
    figures = bench(quick=True).figures
    for workload in ("heavy_tail", "few_shot"):
        assert {f"{workload}_{way}_tokens_per_cpu_s" for way in ways(SCALES["demo"])} < figures.keys()
        assert figures[f"{workload}_packed_padding"] == 0


def test_a_few_answers_are_most_of_a_heavy_tail_and_groups_share_prompts():
    lengths = sorted(len(output) for _, output in heavy_tail(SCALES["demo"], 64))
    assert sum(lengths[-len(lengths) // 4 :]) > 0.5 * sum(lengths)
    prompts = [tuple(prompt) for prompt, _ in few_shot(SCALES["demo"], 64)]
    assert all(prompts.count(prompt) == 8 for prompt in prompts[::8])
