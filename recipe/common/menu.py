"""The parts that a run is made of, what each needs, and which recipe is made of what.

    python -m recipe.common.menu           everything
    python -m recipe.common.menu latr      one recipe's configs

It is read from the YAML files in recipe/common/config/<part> and recipe/*/config: a new file is a new choice.
"""

import argparse
import re
from pathlib import Path

from omegaconf import OmegaConf

CONFIG = Path(__file__).parent / "config"
RECIPES = Path(__file__).parent.parent
PARTS = {
    "tree": "which tokens are generated?",
    "environment": "what answers the model?",
    "sampler": "how is a token drawn?",
    "credit": "which token gets which advantage?",
    "loss": "how far may the policy move?",
    "update": "what is computed?",
    "schedule": "who waits for whom?",
}


def choices(part: str) -> dict[str, tuple[str, str]]:
    """Choice -> the first sentence of its YAML's comment, and what it needs by the line `# Needs: …`."""
    return {file.stem: _about(file) for file in sorted(CONFIG.joinpath(part).glob("*.yaml"))}


def _about(file: Path) -> tuple[str, str]:
    lines = [line[1:].strip() for line in file.read_text().splitlines() if line.startswith("#")]
    needs = next((line.removeprefix("Needs: ") for line in lines if line.startswith("Needs: ")), "")
    text = " ".join(line for line in lines if not line.startswith(("@", "Needs: ")))
    return re.split(r"(?<=[.;])\s", text)[0].rstrip(".;"), needs.rstrip(".")


def recipe_parts(config: Path) -> dict[str, str]:
    """Of one of a recipe's configs, part -> choice, as its list of defaults says."""
    defaults = OmegaConf.load(config).get("defaults", [])
    named = {name: choice for entry in defaults if OmegaConf.is_dict(entry) for name, choice in entry.items()}
    return {part: named[part] for part in PARTS if part in named}


def recipes() -> dict[str, dict[str, str]]:
    """recipe/config -> its parts."""
    files = sorted(RECIPES.glob("*/config/*_trainer.yaml"))
    return {f"{file.parts[-3]}/{file.stem}": recipe_parts(file) for file in files}


def menu() -> str:
    lines = []
    for part, question in PARTS.items():
        lines += ["", f"{part}: {question}"]
        for choice, (about, needs) in choices(part).items():
            lines.append(f"  {part}={choice:<16} {about}")
            if needs:
                lines.append(f"  {'':<{len(part) + 17}} needs {needs}")
    lines += ["", "Recipes, and the parts that they are made of (none: upstream's alone):"]
    for name, parts in recipes().items():
        lines.append(f"  {name:<28} " + " ".join(f"{part}={choice}" for part, choice in parts.items()))
    lines += ["", "Any combination: DRY_RUN=1 bash recipe/common/run_explore.sh tree=… environment=… credit=… loss=…"]
    return "\n".join(lines[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", help="only what is made of parts in this recipe")
    args = parser.parse_args()
    if args.recipe is None:
        print(menu())
        return
    known = {name: parts for name, parts in recipes().items() if name.split("/")[0] == args.recipe}
    if not known:
        raise SystemExit(f"no recipe {args.recipe}; known: {', '.join(sorted({n.split('/')[0] for n in recipes()}))}")
    for name, parts in known.items():
        print(name, " ".join(f"{part}={choice}" for part, choice in parts.items()))


if __name__ == "__main__":
    main()
