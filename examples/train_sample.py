"""Train the sample model from scratch on public-domain books: a plain Llama of about two million parameters.

    python examples/train_sample.py --data ../shared/data/text --out examples/sample-model

The committed weights came from one such run on one CPU thread (see the model card in the output). `--data`
holds `classics/` (Markdown books, see sample_text.py) and `heldout.txt`, which training never sees.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import LlamaConfig, LlamaForCausalLM

import sample_text

SPECIAL = ["<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Settings:
    """Everything the run depends on, besides the books."""

    vocab: int = 2048
    hidden: int = 192
    layers: int = 4
    intermediate: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    context: int = 1024
    tokens_per_step: int = 4096
    length: int = 256  # most steps
    long_share: float = 0.1  # the last steps train on full contexts, so that late positions work too
    chat_share: float = 0.5
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    warmup: int = 40
    average: float = 0.97  # of the weights, step by step: better than the last step's while the rate is high


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """Byte-level BPE over the books."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return tokenizer


def render(messages: list[dict[str, str]]) -> str:
    """What CHAT_TEMPLATE gives for these messages."""
    return SPECIAL[0] + "".join(f"<|{m['role']}|>{m['content']}{SPECIAL[1]}" for m in messages)


def examples(works: list[sample_text.Work], chat_share: float, rng: random.Random) -> Iterator[str]:
    """Endless shuffled mixture of plain passages and conversations."""
    plain = [
        SPECIAL[0] + text
        for work in works
        for section in work.sections
        for text in sample_text.passages(section.paragraphs, 2500)
    ]
    all_text = [p for work in works for section in work.sections for p in section.paragraphs]
    topics = sample_text.Topics(all_text)
    while True:
        chats = [render(messages) for messages in sample_text.chats(works, topics, rng)]
        rng.shuffle(plain)
        rng.shuffle(chats)
        plain_characters = chat_characters = 0
        a, b = iter(plain), iter(chats)
        try:
            while True:
                if chat_characters <= chat_share * (plain_characters + chat_characters):
                    text = next(b)
                    chat_characters += len(text)
                else:
                    text = next(a)
                    plain_characters += len(text)
                yield text
        except StopIteration:
            continue


def token_stream(tokenizer: Tokenizer, texts: Iterator[str], count: int) -> Tensor:
    """The first `count` tokens of the examples, one after the other."""
    ids: list[int] = []
    while len(ids) < count:
        batch = [next(texts) for _ in range(512)]
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            ids.extend(encoding.ids)
    return torch.tensor(ids[:count])


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalized by Newton-Schulz iterations (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon).

    `torch.optim.Muon` iterates in bfloat16, which CPUs without AMX emulate at a twentieth of the speed.
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
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def train(model: LlamaForCausalLM, tokens: Tensor, steps: int, settings: Settings, save: "Save") -> None:
    """One pass over the tokens; the learning rate falls by a cosine to 2 % of its peak."""
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
            batch = tokens[step * settings.tokens_per_step :][: settings.tokens_per_step].view(-1, length)
            loss = model(input_ids=batch, labels=batch).loss
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
def perplexity(
    model: LlamaForCausalLM, tokenizer: Tokenizer, text: str, window: int = 512
) -> tuple[float, float]:
    """Per token, over windows without BOS; and bits per byte, which does not depend on the vocabulary."""
    model.eval()
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)
    total = predicted = 0.0
    for start in range(0, len(ids) - 1, window):
        piece = ids[start : start + window][None]
        if piece.shape[1] > 1:
            total += float(model(input_ids=piece, labels=piece).loss) * (piece.shape[1] - 1)
            predicted += piece.shape[1] - 1
    return math.exp(total / predicted), total / predicted * len(ids) / len(text.encode()) / math.log(2)


@torch.no_grad()
def answer(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str) -> str:
    """A greedy answer, to look at."""
    model.eval()
    ids = tokenizer.encode(f"<|bos|><|user|>{prompt}<|end|><|assistant|>", add_special_tokens=False).ids
    out = model.generate(
        torch.tensor([ids]), max_new_tokens=120, do_sample=False, eos_token_id=1, pad_token_id=5
    )
    return str(tokenizer.decode(out[0, len(ids) :].tolist(), skip_special_tokens=False))


def main() -> None:
    """Read the books, train, save, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with classics/ and heldout.txt")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    settings = Settings()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)

    heldout = arguments.data / "heldout.txt"
    works = sample_text.read_works(arguments.data / "classics", heldout)
    tokenizer = train_tokenizer([p for w in works for s in w.sections for p in s.paragraphs], settings.vocab)
    count = arguments.steps * settings.tokens_per_step
    tokens = token_stream(tokenizer, examples(works, settings.chat_share, rng), count)
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
    print(f"{len(works)} works, {parameters:,} parameters, {count:,} tokens, {asdict(settings)}")
    save = Save(arguments.out, tokenizer)
    train(model, tokens, arguments.steps, settings, save)
    save.write(model)
    if heldout.exists():
        per_token, bits = perplexity(model, tokenizer, heldout.read_text(errors="ignore"))
        print(f"held-out perplexity {per_token:.2f} a token (windows of 512), {bits:.3f} bits a byte")
    for prompt in ("Tell me about the fox.", "Tell me a story.", "Continue: Once upon a time", "Hello!"):
        print(f"> {prompt}\n{answer(model, tokenizer, prompt)}\n")


if __name__ == "__main__":
    main()
