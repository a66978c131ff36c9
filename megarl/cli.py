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
from megarl.config_errors import ConfigError

_OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
_CONFIG = click.argument("config", type=click.Path(path_type=Path))


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


def _checked(config: Path, overrides: tuple[str, ...], *, weights: bool = True) -> RunConfig:
    from megarl.preflight import check

    loaded = load(config, list(overrides))
    check(loaded, weights=weights)
    return loaded


def _run(make: Callable[[], Any]) -> Any:
    from megarl.orchestration.signals import run_until_signal

    return run_until_signal(make())


@main.command()
@_CONFIG
@_OVERRIDES
def train(config: Path, overrides: tuple[str, ...]) -> None:
    """Train with RL; continues from the newest checkpoint of the run, if there is one."""
    from megarl.build import run_training

    click.echo(_run(lambda: run_training(_checked(config, overrides))))


@main.command()
@_CONFIG
@_OVERRIDES
def sft(config: Path, overrides: tuple[str, ...]) -> None:
    """Warm-start the policy, supervised, on the task's own problems (section sft); writes a model folder."""
    from megarl.build import run_sft

    click.echo(_run(lambda: run_sft(_checked(config, overrides))))


@main.command()
@_CONFIG
@click.argument("output", type=click.Path(path_type=Path))
@_OVERRIDES
def init(config: Path, output: Path, overrides: tuple[str, ...]) -> None:
    """Make a small random Qwen3-MoE, with a tokenizer for the task of CONFIG, in the folder OUTPUT."""
    from megarl.data.prompts import make_task
    from megarl.policies.tiny import make_tiny_policy

    loaded = load(config, list(overrides))

    def make() -> None:
        task = make_task(loaded.data, loaded.seed)
        texts = [message["content"] for number in range(2000) for message in task.train(number).messages]
        make_tiny_policy(output, texts, seed=loaded.seed)

    _asked(make)


@main.command(name="eval")
@_CONFIG
@_OVERRIDES
def evaluate(config: Path, overrides: tuple[str, ...]) -> None:
    """Held-out accuracy of the run's newest checkpoint, or of the model it starts from."""
    from megarl.build import run_evaluation

    click.echo(_run(lambda: run_evaluation(_checked(config, overrides))))


@main.command()
@_CONFIG
@click.argument("output", type=click.Path(path_type=Path))
@_OVERRIDES
def export(config: Path, output: Path, overrides: tuple[str, ...]) -> None:
    """Write the run's newest checkpoint as a Hugging Face folder to OUTPUT."""
    from megarl.build import run_export

    if output.exists():
        raise ConfigError(f"OUTPUT ({output}) must not exist yet: nothing is overwritten; choose another folder")
    click.echo(_run(lambda: run_export(_checked(config, overrides), output)))


@main.command()
@_CONFIG
@_OVERRIDES
def plan(config: Path, overrides: tuple[str, ...]) -> None:
    """Layout, memory per GPU and batch arithmetic of a config. Starts nothing; needs only the model's config.json."""
    from megarl.estimate import describe
    from megarl.preflight import check

    loaded = load(config, list(overrides))
    click.echo(describe(loaded, check(loaded, weights=False)))


@main.command()
@click.argument("runs", nargs=-1, required=True)
@click.option("--uri", default="", help="MLflow tracking URI; default is the store beside the runs.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("comparison"), help="Folder for the pictures.")
def compare(runs: tuple[str, ...], uri: str, output: Path) -> None:
    """Compare RUNS (run folders, or MLflow run ids or names): configs, metrics, overlaid curves as PNG and HTML."""
    from megarl.tracking.compare import compare_runs

    _asked(lambda: compare_runs(list(runs), uri=uri, output=output))


@main.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--experts", default=4, show_default=True, help="Copies of every feed-forward block.")
@click.option("--top-k", default=2, show_default=True, help="Experts per token.")
def upcycle(source: Path, output: Path, experts: int, top_k: int) -> None:
    """Turn a dense Llama (a Hugging Face folder, or the word smollm2) into a Mixtral that computes the same."""
    from megarl.policies.upcycle import upcycle as run

    _asked(lambda: run(source, output, experts=experts, top_k=top_k))


@main.command()
def env() -> None:
    """What is found on this machine, what it is used for, and what stands in where something is missing."""
    from megarl.environment import render, report

    render(report())


def _asked(action: Callable[[], Any]) -> None:
    """Run ``action``; its ValueError is a mistake in what was asked for."""
    try:
        action()
    except ValueError as error:
        raise ConfigError(str(error)) from error


if __name__ == "__main__":
    main()
