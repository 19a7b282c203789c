"""Train the sample model from scratch: a plain Llama of about five million parameters that answers questions
of a small domain (`sample/questions.py`).

    python examples/train_sample.py --out examples/sample-model
    python examples/train_sample.py --out examples/sample-model --ask       only ask what was held out

Needs no data beside this folder. The committed weights came from one such run, an hour on two busy processor
cores. Undisturbed they do 5,700 tokens/s where they multiply bfloat16 (36 minutes in all), 3,300 where they
do not. At the end the model is asked one hundred questions that training never saw.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import LlamaConfig, LlamaForCausalLM

from sample.ask import Ask
from sample.questions import Questions, held_out

SPECIAL = ["<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Settings:
    """Everything the run depends on."""

    vocab: int = 2048
    hidden: int = 256
    layers: int = 6
    intermediate: int = 704
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    context: int = 1024
    tokens_per_step: int = 4096
    length: int = 256  # tokens of a sequence in most steps
    long_share: float = 0.08  # the last steps train on full contexts, so that late positions work too
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    warmup: int = 40
    # decay of the weights' moving average, which is better than the last weights while the rate is high
    average: float = 0.99


SAMPLING = {"temperature": 0.4, "top_p": 0.9}
"""The model's sampling defaults: a low temperature, since it knows its answers by heart."""
FAST = torch.cpu._is_avx512_bf16_supported()
PRODUCTS = torch.bfloat16 if FAST else torch.float32
"""Type of matrix products: bfloat16 where the processor has units for it, which halves the time of a run."""

IGNORED = -100
"""Label of a token that is not learnt: of questions, which people write."""


def train_tokenizer(texts: Iterator[str], vocab: int) -> Tokenizer:
    """Byte-level BPE whose digits stand alone, so that a number is spelt the same wherever it stands."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return tokenizer


def stream(tokenizer: Tokenizer, seed: int, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` tokens of conversations one after the other, and their labels."""
    ids: list[int] = []
    labels: list[int] = []
    bos, end = (tokenizer.token_to_id(each) for each in SPECIAL[:2])
    known: dict[str, list[int]] = {}
    for messages in Questions(seed).conversations():
        ids.append(bos)
        labels.append(IGNORED)
        for message in messages:
            text = message["content"]
            if text not in known:
                known[text] = tokenizer.encode(text, add_special_tokens=False).ids
            taught = [*known[text], end]
            ids += [tokenizer.token_to_id(f"<|{message['role']}|>"), *taught]
            labels += [IGNORED, *(taught if message["role"] == "assistant" else [IGNORED] * len(taught))]
        if len(ids) >= count:
            return torch.tensor(ids[:count]), torch.tensor(labels[:count])
    raise AssertionError("conversations end")


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalized by Newton-Schulz iterations (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon).

    `torch.optim.Muon` iterates in bfloat16, which CPUs without units for it emulate at a
    twentieth of the speed.
    """

    def __init__(self, params: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix."""
        for group in self.param_groups:
            for matrix in group["params"]:
                average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonal(matrix.grad.lerp(average, group["momentum"]))
                rows, columns = matrix.shape
                matrix.mul_(1 - 0.01 * group["lr"]).add_(
                    update, alpha=-group["lr"] * max(1, rows / columns) ** 0.5
                )


def orthogonal(matrix: Tensor) -> Tensor:
    """About U·Vᵀ of the matrix's singular value decomposition."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T).T
    x = (matrix / (matrix.norm() + 1e-7)).to(PRODUCTS)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.to(matrix.dtype)


def train(
    model: LlamaForCausalLM, data: tuple[Tensor, Tensor], steps: int, settings: Settings, save: "Save"
) -> None:
    """Train in one pass over the tokens; the learning rate falls by a cosine to 2 % of its peak."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = Muon(matrices, settings.muon_lr)
    adam = torch.optim.AdamW(others, settings.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    peaks = ((muon, settings.muon_lr), (adam, settings.adam_lr))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(settings.average))
    model.train()
    columns = (*Progress.get_default_columns()[:3], TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns) as progress:
        task, smooth, began = progress.add_task("training", total=steps, note=""), math.nan, time.monotonic()
        for step in range(steps):
            length = settings.context if step >= steps * (1 - settings.long_share) else settings.length
            ids, labels = (
                each[step * settings.tokens_per_step :][: settings.tokens_per_step].view(-1, length)
                for each in data
            )
            with torch.autocast("cpu", torch.bfloat16, enabled=FAST):
                loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(others, 1.0)
            scale = min(1.0, (step + 1) / settings.warmup) * (0.51 + 0.49 * math.cos(math.pi * step / steps))
            for optimizer, peak in peaks:
                optimizer.param_groups[0]["lr"] = peak * scale
                optimizer.step()
                optimizer.zero_grad()
            average.update_parameters(model)
            smooth = loss.item() if math.isnan(smooth) else 0.97 * smooth + 0.03 * loss.item()
            rate = (step + 1) * settings.tokens_per_step / (time.monotonic() - began)
            progress.update(task, advance=1, note=f"loss {smooth:.3f}, {rate:.0f} tokens/s")
            if not progress.console.is_terminal and step % 50 == 49:
                progress.console.print(f"step {step + 1}/{steps} loss {smooth:.3f} {rate:.0f} tokens/s")
            if save.due():
                save.write(average.module)
    model.load_state_dict(average.module.state_dict())


class Save:
    """Writes the model in the Hugging Face layout, every few minutes and at the end."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, every_s: float = 240) -> None:
        self.folder, self.tokenizer, self.every_s, self.last = folder, tokenizer, every_s, time.monotonic()

    def due(self) -> bool:
        """Whether the last checkpoint is old enough."""
        return time.monotonic() - self.last > self.every_s

    def write(self, model: LlamaForCausalLM) -> None:
        """Weights in bfloat16, config, tokenizer, chat template."""
        self.last = time.monotonic()
        copy = LlamaForCausalLM(model.config)
        copy.load_state_dict(model.state_dict())
        copy.generation_config.update(do_sample=True, **SAMPLING)
        copy.to(torch.bfloat16).save_pretrained(self.folder)
        self.tokenizer.save(str(self.folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[0],
            "eos_token": SPECIAL[1],
            "pad_token": SPECIAL[5],
            "model_max_length": model.config.max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
        }
        (self.folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


@torch.no_grad()
def answer(model: LlamaForCausalLM, tokenizer: Tokenizer, question: str) -> str:
    """A greedy answer."""
    model.eval()
    ids = tokenizer.encode(f"<|bos|><|user|>{question}<|end|><|assistant|>", add_special_tokens=False).ids
    out = model.generate(
        torch.tensor([ids]), max_new_tokens=200, do_sample=False, eos_token_id=1, pad_token_id=5
    )
    return str(tokenizer.decode(out[0, len(ids) :].tolist(), skip_special_tokens=True))


def examine(model: LlamaForCausalLM, tokenizer: Tokenizer, asks: list[Ask]) -> float:
    """The share of questions that are answered rightly; prints the wrong answers."""
    right = 0
    for ask in asks:
        said = answer(model, tokenizer, ask.question)
        right += ask.judge(said)
        if not ask.judge(said):
            print(f"wrong ({ask.kind}): {ask.question!r} -> {said!r}, not {ask.answer!r}")
    return right / len(asks)


def main() -> None:
    """Train, save, ask."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ask", action="store_true", help="only ask the model in --out")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if not arguments.ask:
        run(arguments.out, arguments.steps, arguments.seed)
    model = LlamaForCausalLM.from_pretrained(arguments.out, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(arguments.out / "tokenizer.json"))
    print(f"{examine(model, tokenizer, held_out()):.0%} of the questions held out are answered rightly")


def run(out: Path, steps: int, seed: int) -> None:
    """Train from scratch and save."""
    settings = Settings()
    torch.set_flush_denormal(True)
    torch.manual_seed(seed)
    texts = islice(Questions(seed + 1).conversations(), 20_000)
    tokenizer = train_tokenizer((m["content"] for each in texts for m in each), settings.vocab)
    data = stream(tokenizer, seed, steps * settings.tokens_per_step)
    config = LlamaConfig(
        vocab_size=settings.vocab,
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=5,
    )
    model = LlamaForCausalLM(config)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {len(data[0]):,} tokens, {asdict(settings)}")
    save = Save(out, tokenizer)
    train(model, data, steps, settings, save)
    save.write(model)


if __name__ == "__main__":
    main()
