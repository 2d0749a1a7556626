"""Write a tiny, random Llama model with tokenizer and chat template: real enough for vLLM, with nothing to download.

Needs the standard library only. The weights are random but fixed, so greedy answers are repeatable; the output layer
knows only whole words and never the end-of-sequence token, so an answer is a readable word salad of exactly as many
tokens as were asked for. Tensor parallelism up to 4 and pipeline parallelism up to 2 divide it evenly.

Usage: tiny_model.py FOLDER
"""

from __future__ import annotations  # array is not subscriptable at run time before Python 3.12

import argparse
import json
import math
import random
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path

HIDDEN, INTERMEDIATE, LAYERS, HEADS = 64, 128, 2, 4
HEAD_DIM = 32  # vLLM's CPU attention supports no less
MAX_POSITIONS = 2048
SEED = 0

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
SPECIAL = (UNKNOWN, BEGIN, END)
WORDS = """
    the a pod ray node engine replica slot head worker model token cluster actor cache batch tensor rank fence lease
    small quick brown lazy calm bright green quiet old new fox dog river garden window lantern harbour mountain and
    or with under over beside while then runs waits serves jumps sings sleeps starts stops drains heals
""".split()  # noqa: SIM905  # a list of quoted words would be harder to read
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_alphabet() -> list[str]:
    """Return the printable character that byte-level BPE writes for each of the 256 bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    stand_ins = iter(range(256, 512))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def vocabulary() -> dict[str, int]:
    """Map token to id: special tokens, all bytes (so that any text can be encoded), words with a leading space."""
    alphabet = byte_alphabet()
    tokens = [*SPECIAL, *alphabet, *(alphabet[ord(" ")] + word for word in WORDS)]
    return {token: index for index, token in enumerate(tokens)}


def tokenizer() -> dict[str, object]:
    """Build a tokenizer in the format of the `tokenizers` library: known words whole, everything else byte by byte."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": token, **special} for index, token in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": UNKNOWN,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # a pre-token that is in the vocabulary is taken whole, without merge rules
            "vocab": vocabulary(),
            "merges": [],
        },
    }


def tokenizer_config() -> dict[str, object]:
    """Build what `transformers` reads beside the tokenizer."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": UNKNOWN,
        "bos_token": BEGIN,
        "eos_token": END,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }


def config() -> dict[str, object]:
    """Build the model's configuration."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary()),
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": SPECIAL.index(BEGIN),
        "eos_token_id": SPECIAL.index(END),
        "dtype": "float32",
    }


def weights(rng: random.Random) -> Iterator[tuple[str, list[int], array[float]]]:
    """Yield name, shape and float32 values of every tensor."""
    vocab = vocabulary()

    def matrix(rows: int, columns: int, deviation: float) -> array[float]:
        return array("f", (rng.gauss(0.0, deviation) for _ in range(rows * columns)))

    def linear(name: str, rows: int, columns: int) -> tuple[str, list[int], array[float]]:
        return f"{name}.weight", [rows, columns], matrix(rows, columns, 1 / math.sqrt(columns))

    def norm(name: str) -> tuple[str, list[int], array[float]]:
        return f"{name}.weight", [HIDDEN], array("f", [1.0]) * HIDDEN

    yield "model.embed_tokens.weight", [len(vocab), HIDDEN], matrix(len(vocab), HIDDEN, 1.0)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield norm(f"{prefix}.input_layernorm")
        for projection in ("q_proj", "k_proj", "v_proj"):
            yield linear(f"{prefix}.self_attn.{projection}", HEADS * HEAD_DIM, HIDDEN)
        yield linear(f"{prefix}.self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM)
        yield norm(f"{prefix}.post_attention_layernorm")
        yield linear(f"{prefix}.mlp.gate_proj", INTERMEDIATE, HIDDEN)
        yield linear(f"{prefix}.mlp.up_proj", INTERMEDIATE, HIDDEN)
        yield linear(f"{prefix}.mlp.down_proj", HIDDEN, INTERMEDIATE)
    yield norm("model.norm")
    # Words get widely spread logits (deviation 8), all other tokens zero: even at temperature 1 only words come out.
    silent = array("f", [0.0]) * ((len(vocab) - len(WORDS)) * HIDDEN)
    yield "lm_head.weight", [len(vocab), HIDDEN], silent + matrix(len(WORDS), HIDDEN, 1.0)


def write_safetensors(path: Path, tensors: Iterator[tuple[str, list[int], array[float]]]) -> None:
    """Write tensors in the safetensors format: length of the header (8 bytes), JSON header, little-endian data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, shape, values in tensors:
        start = len(data)
        data += struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, len(data)]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def write_model(folder: Path) -> None:
    """Write the model into a folder, which is made when missing; the same bytes every time."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", config()),
        ("tokenizer.json", tokenizer()),
        ("tokenizer_config.json", tokenizer_config()),
    ):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    write_safetensors(folder / "model.safetensors", weights(random.Random(SEED)))  # noqa: S311  # not a secret


def main() -> None:
    """Command line: one argument, the folder."""
    parser = argparse.ArgumentParser(description="Write a tiny random model for tests.")
    parser.add_argument("folder", type=Path)
    write_model(parser.parse_args().folder)


if __name__ == "__main__":
    main()
