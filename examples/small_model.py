"""A small model, its tokenizer and text to train it on, made on the spot: all that `train` needs.

    python examples/small_model.py FOLDER

writes FOLDER/model (a Qwen3 of 4 layers with random weights, saved by transformers, and a tokenizer
of 4,096 tokens with a template of chats), FOLDER/docs.jsonl and FOLDER/eval.jsonl: the docstrings
of the Python packages that are installed here, several megabytes of English. It needs
`pip install transformers`, in the Python in which twinstream is installed.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

try:
    import numpy
    import scipy
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
except ModuleNotFoundError as error:
    sys.exit(
        f"error: {error.name} is not installed for {sys.executable}: "
        f"{sys.executable} -m pip install transformers torch scipy"
    )

PACKAGES = (numpy, scipy, torch)
VOCAB_SIZE, BEGIN, END = 4096, "<|im_start|>", "<|im_end|>"
CHATML = (  # the end of a turn is learned, so that the model stops
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SHORTEST, EVERY_FOR_EVAL = 200, 50


def docstrings(folder: Path) -> Iterator[str]:
    """Of every module, class and function below a folder."""
    for path in sorted(folder.rglob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) >= SHORTEST:
                    yield text


def write_rows(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """Made of these texts, with the template of ChatML."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=VOCAB_SIZE, special_tokens=[END, BEGIN])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=END)
    tokenizer.chat_template = CHATML
    return tokenizer


def main(folder: Path) -> None:
    """Write all of it."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [text for p in PACKAGES for text in docstrings(Path(p.__file__).parent)]
    texts = list(dict.fromkeys(found))
    write_rows(folder / "docs.jsonl", [t for n, t in enumerate(texts) if n % EVERY_FOR_EVAL])
    write_rows(folder / "eval.jsonl", texts[::EVERY_FOR_EVAL])
    tokenizer = tokenizer_of(texts)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=192, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=48, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    megabytes = sum(map(len, texts)) / 1e6
    print(
        f"{folder}: a model of {model.num_parameters() / 1e6:.1f} M parameters and {megabytes:.1f} "
        f"MB of text in {len(texts):,} documents"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
