"""Small files, tokenizers and chat templates, made on the spot."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from twinstream.data.chunk_stream import ChunkStream
from twinstream.data.options import DataOptions, Source
from twinstream.data.packing import Chunk
from twinstream.data.training_data import TrainingData

HERE = DataOptions(workers=0)

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

MARKED = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}

    {%- else %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
    {%- endif %}
{%- endfor %}
"""

# As Qwen3's and others': what the assistant thought is left out of all turns but the last.
FORGETFUL = """{%- for message in messages %}
{%- set content = message.content.split('</think>')[-1] if not loop.last else message.content %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is é?"},
    {"role": "assistant", "content": "A letter, é."},
    {"role": "user", "content": "And 2 < 3?"},
    {"role": "assistant", "content": "True."},
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]


def paragraphs() -> list[str]:
    """Of Python's help topics: some 2,700, most of them short."""
    return [p for name in sorted(topics) for p in topics[name].split("\n\n") if p.strip()]


def lines_of(rows: Iterable[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def data_of(path: Path, tokenizer: Path | None = None, **more: Any) -> TrainingData:
    """Opened in this process, with documents of up to 64 tokens if no other number is given."""
    arguments: dict[str, Any] = {"longest": 64, "options": HERE} | more
    return TrainingData.open([Source(path)], tokenizer, **arguments)


def an_epoch(stream: ChunkStream) -> list[Chunk]:
    """The chunks up to the end of the epoch."""
    epoch, chunks = stream.position.epoch, []
    while stream.position.epoch == epoch:
        chunks.append(next(stream))
    return chunks


def documents(chunk: Chunk) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of each, without the padding."""
    found, at = [], 0
    for length in chunk.lengths:
        if at < len(chunk.ids) - chunk.num_padding:
            found.append(
                (chunk.ids[at : at + length].tolist(), chunk.labels[at : at + length].tolist())
            )
        at += length
    return found


def learned_text(tokenizer: Any, chunk: Chunk) -> list[str]:
    """What is learned of each document."""
    return [
        tokenizer.decode([label for label in labels if label >= 0], skip_special_tokens=False)
        for _, labels in documents(chunk)
    ]


@cache
def _definition(add_bos: bool) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(paragraphs()[:200], trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            "<s> $A", special_tokens=[("<s>", 3)]
        )
    return tokenizer.to_str()


def tokenizer_folder(folder: Path, template: Any = CHATML, *, add_bos: bool = False) -> Path:
    """A folder as Hugging Face stores a tokenizer; its end token is <|endoftext|>."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_definition(add_bos))
    settings = {
        "eos_token": {"content": "<|endoftext|>"},
        "bos_token": "<s>",
        "add_bos_token": True,
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def loaded(folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))
