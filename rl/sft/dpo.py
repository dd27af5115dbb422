"""Train on preference pairs of exact token ids (DPO), with TRL.

    python -m rl.sft.dpo SETTINGS.json

TRL comes from where scripts/llamafactory.sh puts it. (In an environment that has TRL, verl needs a part of it that TRL
1.16 no longer has.) ``rl.sft.other`` writes the settings: model, data (a parquet file of ``rl.sft.episodes``), dpo,
which are fields of TRL's DPOConfig, and lora, those of PEFT's LoraConfig, or null for all weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    """Train as the settings say."""
    import importlib

    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trl: Any = importlib.import_module("trl")  # not in the environment that is type-checked

    class ExactDPOTrainer(trl.DPOTrainer):
        """This is TRL's trainer, for pairs that are token ids already."""

        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

    given = json.loads(Path(path).read_text())
    tokenizer: Any = AutoTokenizer.from_pretrained(given["model"])
    settings = trl.DPOConfig(
        per_device_train_batch_size=1,
        max_length=None,
        lr_scheduler_type="cosine",
        warmup_ratio=0.05,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        **given["dpo"],
    )
    trainer = ExactDPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32 if settings.use_cpu else "auto"),
        args=settings,
        train_dataset=load_dataset("parquet", data_files=given["data"], split="train"),
        processing_class=tokenizer,
        peft_config=LoraConfig(task_type="CAUSAL_LM", **given["lora"]) if given["lora"] else None,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()  # trainer_state.json, with the figures of each step


if __name__ == "__main__":
    main(sys.argv[1])
