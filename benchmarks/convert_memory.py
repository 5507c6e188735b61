"""How much memory a conversion takes, on a random checkpoint of a given size.

    python benchmarks/convert_memory.py --gigabytes 4 --against-mlx-lm

Each conversion runs in a process of its own; its peak is what the kernel says at its end
(``ru_maxrss``). The checkpoint is a Llama in bfloat16 in files of about 1 GB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mlx_specstream import accelerate

accelerate.load_openblas()  # before anything imports mlx.core

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

SHAPE = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
WAYS = {"as it is": [], "4-bit": ["-q"]}


def write_checkpoint(folder: Path, gigabytes: float) -> tuple[int, int]:
    """A random model; returns its bytes and those of its largest tensor."""
    layer = 122e6  # bytes
    config = SHAPE | {"num_hidden_layers": max(1, round(gigabytes * 1e9 / layer))}
    arrays = dict(tree_flatten(llama.Model(llama.ModelArgs.from_dict(config)).parameters()))
    sizes = [2 * array.size for array in arrays.values()]
    names, count = list(arrays), max(1, round(gigabytes))
    for i in range(count):
        shard = {name: arrays.pop(name).astype(mx.bfloat16) for name in names[i::count]}
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        mx.save_safetensors(str(folder / file), shard, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b").save_pretrained(folder)
    return sum(sizes), max(sizes)


def measure(command: list[str]) -> tuple[int, float]:
    """Peak bytes and seconds of a command.

    Raises:
        RuntimeError: It failed.
    """
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak, time.perf_counter() - start


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="Measure how much memory conversions take.")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--against-mlx-lm", action="store_true")
    args = parser.parse_args()
    ours = [sys.executable, str(Path(__file__).parent.parent / "scripts" / "convert.py")]
    programs = {"ours": ours}
    if args.against_mlx_lm:
        programs["mlx-lm"] = [sys.executable, "-m", "mlx_lm", "convert"]
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "hf"
        source.mkdir()
        # In a process of its own: on Linux a child's peak begins with what its parent has.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            size, largest = pool.apply(write_checkpoint, (source, args.gigabytes))
        print(f"model {size / 1e6:,.0f} MB, its largest tensor {largest / 1e6:,.0f} MB")
        print(f"{'program':8} {'result':10} {'peak MB':>9} {'seconds':>9}")
        for what, flags in WAYS.items():
            for name, program in programs.items():
                target = Path(work) / "mlx"
                options = ["--hf-path", str(source), "--mlx-path", str(target), *flags]
                peak, seconds = measure([*program, *options])
                print(f"{name:8} {what:10} {peak / 1e6:9,.0f} {seconds:9.1f}", flush=True)
                shutil.rmtree(target)


if __name__ == "__main__":
    main()
