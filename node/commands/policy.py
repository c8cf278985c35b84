"""The commands about a policy by itself: `policy export` takes it out of a run, `eval` measures it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from node.commands.common import DataDirOption, JsonOption, begin, one_of
from node.homes import expand
from node.logs import set_up_logging
from protocol.errors import ConfigError

policy_app = typer.Typer(no_args_is_help=True, help="Take a policy out of a trainer's data directory.")


def register(app: typer.Typer) -> None:
    app.add_typer(policy_app, name="policy")
    app.command("eval")(evaluate_policy)


@policy_app.command("export")
def export_policy(
    out: Annotated[Path, typer.Option("--out", help="Directory to write; transformers loads it.")],
    data_dir: DataDirOption = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="A training checkpoint instead of the newest of the data directory.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Checkpoint of this step.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Convert weights to float32 or bfloat16.")] = None,
) -> None:
    """Export a policy as a Hugging Face directory: config, tokenizer, generation config, safetensors."""
    from trainer.export import DTYPES, policy_directory
    from trainer.export import export_policy as export

    if dtype not in (None, *DTYPES):
        raise ConfigError(f"no such number format: {dtype!r}", hint=f"--dtype {' or '.join(DTYPES)}")
    found = policy_directory(expand(source) if source else begin(data_dir), step=step)
    typer.echo(export(found, out, dtype=dtype))


def evaluate_policy(
    model: Annotated[
        str,
        typer.Option(
            "--model", help="A model directory, a training checkpoint, a trainer's data directory, or a policy's name."
        ),
    ],
    tasks: Annotated[
        str | None, typer.Option("--tasks", help="A shipped table (table-1), lm-eval's task names, or `list`.")
    ] = None,
    environment: Annotated[
        str | None, typer.Option("--environment", help="An environment of this installation; needs no lm-eval.")
    ] = None,
    parameter: Annotated[
        list[str] | None, typer.Option("--parameter", help="NAME=JSON of the environment; may be given again.")
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="The environment's file of problems.")] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Checkpoint of this step.")] = None,
    prompts: Annotated[int, typer.Option("--prompts", min=2, help="Held-out prompts.")] = 256,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Answers to each prompt.")] = 4,
    pass_at: Annotated[list[int] | None, typer.Option("--pass-at", min=1, help="k of pass@k; default: 1.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.01, max=10)] = 1.0,
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", min=1)] = None,
    held_out_set: Annotated[str, typer.Option("--set", help="Name of the held-out prompts.")] = "eval",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only so many examples of each task.")] = None,
    task_dir: Annotated[Path | None, typer.Option("--task-dir", help="Your own tasks in lm-eval's YAML.")] = None,
    download: Annotated[bool, typer.Option("--download", help="Let lm-eval fetch data from the network.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Ask lm-eval's tasks through the chat template.")] = False,
    engine: Annotated[str, typer.Option("--engine", help="What generates for --environment: torch or vllm.")] = "torch",
    backend: Annotated[str, typer.Option("--backend", help="What lm-eval generates with: hf or vllm.")] = "hf",
    dtype: Annotated[
        str, typer.Option("--dtype", help="Number format: float32 or bfloat16.", callback=one_of("dtype"))
    ] = "float32",
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option("--threads", min=0, help="CPU threads; 0: as torch chooses.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a policy: on an environment (pass@k), or on the field's benchmarks through lm-eval."""
    from node.benchmarks import Harness
    from node.eval_show import parse_parameters, show_environment, show_tasks

    set_up_logging("warning")
    if (tasks is None) == (environment is None):
        raise ConfigError("give either --tasks or --environment", hint="--tasks table-1, or --environment sort-digits")
    directory = _policy(model, step)
    if environment is None:
        harness = Harness(
            model=directory, backend=backend, device=device, dtype=dtype, limit=limit, chat=chat, task_dir=task_dir,
            download=download,
        )  # fmt: skip
        raise typer.Exit(show_tasks(tasks or "", harness, as_json=as_json))
    from node.eval_compute import Plan

    plan = Plan(
        model=directory, environment=environment, parameters=parse_parameters(parameter or []), data=data,
        prompts=prompts, samples=samples, pass_at=tuple(pass_at or [1]), temperature=temperature,
        max_new_tokens=max_new_tokens, held_out_set=held_out_set, engine=engine, dtype=dtype, device=device,
        threads=threads,
    )  # fmt: skip
    show_environment(plan, as_json=as_json)


def _policy(model: str, step: int | None) -> Path:
    """A policy in a directory, or one that recipes and `data filter` know by name."""
    from node.run_create import model_directory
    from trainer.export import policy_directory

    path = expand(Path(model))
    return policy_directory(path if path.exists() else model_directory(model), step=step)
