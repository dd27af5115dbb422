"""``prepare`` for the toy run: a random Qwen3 of about 1M parameters, its tokenizer, eight prompts."""

from pathlib import Path

VOCAB = 512


def make_model(directory: Path, seed: int = 0, hidden: int = 128, layers: int = 4) -> Path:
    """Random, untied Qwen3 with a byte-level tokenizer made on the spot."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|pad|>", "<|im_start|>", "<|im_end|>", *alphabet]
    tokens += [f"<|extra_{i}|>" for i in range(VOCAB - len(tokens))]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(directory)
    fast.save_pretrained(directory)
    return directory


def prepare(cfg, say) -> dict:
    """Make model and data under ``run.dir``; find them there when called again."""
    import pandas

    base = Path(cfg.run.dir) / "inputs"
    files = {split: base / f"{split}.parquet" for split in ("train", "val")}
    if not files["val"].exists():
        make_model(base / "model")
        for split, file in files.items():
            rows = [
                {
                    "prompt": [{"role": "user", "content": f"task {i}"}],
                    "data_source": "toy",
                    "reward_model": {"style": "rule", "ground_truth": ""},
                    "extra_info": {"index": i, "split": split},
                }
                for i in range(8)
            ]
            pandas.DataFrame(rows).to_parquet(file)
    return {
        "data.custom_cls": {"path": None, "name": None},  # verl's own dataset
        "actor_rollout_ref.model.path": str(base / "model"),
        "data.train_files": str(files["train"]),
        "data.val_files": str(files["val"]),
    }
