"""Prints the parts that make up a run, their requirements, and the parts that each recipe chooses.

    python -m recipe.common.menu             everything
    python -m recipe.common.menu tree=latr   the values that a choice sets, and its keys
    python -m recipe.common.menu evaluation  the benchmarks, and where to get each

Tasks, trees, samplers, credits and losses come from the registry (verl.utils.parts); the choices of the other parts,
the recipes and task=none are the YAML files in recipe/*/config/<part>.
"""

import argparse
import inspect
import re
import textwrap
from dataclasses import asdict
from pathlib import Path

from omegaconf import OmegaConf

from verl.evaluation.questions.benchmarks import find_benchmark
from verl.evaluation.scores.scoring import find_scoring
from verl.utils.parts import KINDS, parts

CONFIG = Path(__file__).parent / "config"
RECIPES = Path(__file__).parent.parent
PARTS = {
    "task": "what is learnt?",
    "tree": "which tokens are generated?",
    "environment": "what answers the model?",
    "sampler": "how is a token drawn?",
    "credit": "which token gets which advantage?",
    "loss": "how far may the policy move?",
    "update": "what is computed?",
    "schedule": "who waits for whom?",
    "recipe": "which method's parts and values?",
}


def choices(part: str) -> dict[str, tuple[str, str]]:
    """Return choice -> (sentence about it, its requirements), from the registry or from its YAML file's comments."""
    registered = parts(part) if part in KINDS else {}
    chosen = {name: (each.about, each.requires) for name, each in registered.items() if not each.alias}
    return chosen | {name: _about(file) for name, file in choice_files(part).items()}


def choice_files(part: str) -> dict[str, Path]:
    """Return choice -> YAML file of a part, sorted by folder."""
    return {file.stem: file for file in sorted(RECIPES.glob(f"*/config/{part}/*.yaml"))}


def _about(file: Path) -> tuple[str, str]:
    lines = [line[1:].strip() for line in file.read_text().splitlines() if line.startswith("#")]
    needs = next((line.removeprefix("Needs: ") for line in lines if line.startswith("Needs: ")), "")
    text = " ".join(line for line in lines if not line.startswith(("@", "Needs: ")))
    return re.split(r"(?<=[.;])\s", text)[0].rstrip(".;"), needs.rstrip(".")


def recipe_parts(name: str) -> dict[str, str]:
    """Return part -> choice for all parts that a recipe, or a recipe that it extends, overrides."""
    files = choice_files("recipe")
    chosen: dict[str, str] = {}
    for entry in OmegaConf.load(files[name]).get("defaults", []):
        if isinstance(entry, str):
            chosen |= recipe_parts(entry) if entry in files else {}
        else:
            chosen |= {key.removeprefix("override /"): choice for key, choice in entry.items()}
    return chosen


def menu() -> str:
    """Return the list of all parts and their choices."""
    lines = []
    for part, question in PARTS.items():
        lines += ["", f"{part}: {question}"]
        for choice, (about, needs) in choices(part).items():
            lines.append(f"  {part}={choice:<16} {about}")
            if needs:
                lines.append(f"  {'':<{len(part) + 17}} needs {needs}")
            if part == "recipe":
                chosen = " ".join(f"{kind}={name}" for kind, name in recipe_parts(choice).items())
                lines.append(f"  {'':<{len(part) + 17}} {chosen}".rstrip())
    lines += ["", "What a choice sets, and what its keys mean: python -m recipe.common.menu tree=latr"]
    lines += ["Any combination: DRY_RUN=1 bash recipe/common/run_explore.sh recipe=… tree=… credit=… loss=…"]
    return "\n".join(lines[1:])


def about_choice(part: str, choice: str) -> str:
    """Return the config values that a choice sets, and the documentation of its keys."""
    if part == "evaluation":
        return about_benchmark(choice)
    if part not in PARTS:
        raise ValueError(f"{part}: expected one of {', '.join(PARTS)}, evaluation")
    if (file := choice_files(part).get(choice)) is not None:
        return file.read_text()
    if part not in KINDS or choice not in parts(part):
        raise ValueError(f"{part}={choice}: expected one of {', '.join(choices(part))}")
    chosen = parts(part)[choice]
    text = f"# {chosen.about}\n{OmegaConf.to_yaml(chosen.node())}"
    if (keys := getattr(chosen, "keys", None)) is None:
        return text
    defaults = OmegaConf.to_yaml(OmegaConf.create(asdict(keys())))
    return f"{text}\n{inspect.getdoc(keys)}\n\nDefaults:\n{textwrap.indent(defaults, '    ')}"


def about_benchmark(name: str) -> str:
    """Return where to get a benchmark, which fields it has, and how it is asked and scored."""
    benchmark = find_benchmark(name)
    lines = [f"evaluation={name}: {benchmark.title}", f"  get      {benchmark.get}", f"  fields   {benchmark.fields()}"]
    scoring = f"{benchmark.scoring}: {find_scoring(benchmark.scoring).about}"
    lines += [f"  asked    {benchmark.style}, scored by {scoring}"]
    lines += [f"  left out {reason}" for reason in benchmark.left_out]
    return "\n".join(lines + [f"  note     {benchmark.note}"] * bool(benchmark.note))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("choice", nargs="?", help="such as tree=latr; `evaluation` lists the benchmarks")
    choice = parser.parse_args().choice
    try:
        if choice is None:
            print(menu())
        elif choice == "evaluation":
            print(*map(about_benchmark, parts("evaluation")), sep="\n")
        else:
            part, _, name = choice.partition("=")
            print(about_choice(part, name))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
