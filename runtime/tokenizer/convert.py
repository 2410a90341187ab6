"""Writes the tokenizer of a GGUF file or a directory as plain files.

`python -m runtime.tokenizer.convert SOURCE TARGET`. It runs as a process of its own, so that the
memory of transformers and torch is freed when it ends.
"""

import sys
from pathlib import Path

from runtime.tokenizer.gguf_header import HeaderError, check_file


def main(source: Path, target: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, if there is one, chat_template.jinja into `target`. Raises
    HeaderError for a damaged GGUF file."""
    if not source.is_dir():
        # The gguf library, which transformers reads it with, would fill the memory with an array as long as it says.
        check_file(source)
    from transformers import AutoTokenizer

    if source.is_dir():
        tokenizer = AutoTokenizer.from_pretrained(source)
    else:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except HeaderError as error:
        sys.exit(str(error))
