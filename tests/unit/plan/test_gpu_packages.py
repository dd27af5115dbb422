"""A run on GPUs is refused before it starts if a package is missing or the trainer's attention cannot work."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl.checks import packages
from rl.checks.packages import ATTENTION, INSTALL, ULYSSES, check_packages
from rl.config.compose import CONFIGS, ConfigError
from rl.plan import memory
from rl.plan.layout import layout_of
from rl.plan.model import load_config, shape_of
from tests.check_kit import composed

ROOT = CONFIGS.parent
UV = ".venv/bin/uv pip install --python .venv"
FULL = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml") if path.stem != "quickstart")
MEGATRON = ["megatron-core", "megatron-bridge", "transformer-engine", "flash-attn"]


def needed(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> list[str]:
    """The packages that are looked for."""
    asked: list[str] = []
    monkeypatch.setattr(packages, "_problem", lambda package: asked.append(package) or "")
    check_packages(composed(*overrides))
    return asked


@pytest.mark.parametrize("name", FULL)
def test_what_an_experiment_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = MEGATRON if name.endswith("megatron") else ["flash-attn"]
    if name.endswith("separate"):
        expected = [*expected, "cupy-cuda13x"]
    if "qwen3_5" in name:
        expected = [*expected, "flash-linear-attention"]
    assert needed(monkeypatch, f"+experiment={name}") == expected
    if not name.endswith("megatron"):
        assert needed(monkeypatch, f"+experiment={name}", "scale=tiny") == []


@pytest.mark.parametrize(
    ("attention", "package"), [("flash_attention_4", ["flash-attn-4"]), ("kernels-community/flash-attn2", ["kernels"])]
)
def test_what_another_attention_needs(attention: str, package: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert needed(monkeypatch, "+experiment=qwen3_coder_30b", f"{ATTENTION}={attention}") == package


def test_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this is in the CPU environment, which has no accelerator."""
    for package, arguments in INSTALL.items():
        assert packages._problem(package) in ("", "is not installed")
        listed = re.search(r"-r (\S+)", arguments)
        assert listed is None or re.search(rf"^{package}( @|==)", (ROOT / listed[1]).read_text(), re.MULTILINE)
    monkeypatch.setattr(packages, "_problem", lambda package: "is not installed")
    line = "flash-attn is needed on GPUs, but is not installed: " + f"{UV} --no-deps -r constraints/flash-attn.txt"
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        check_packages(composed("+experiment=qwen3_4b"))
    check_packages(composed("+experiment=quickstart"))


def test_the_image_installs_from_the_same_files() -> None:
    """The image itself has never been built."""
    text = (ROOT / "packaging" / "container" / "Dockerfile").read_text()
    setup = (ROOT / "scripts" / "setup.sh").read_text().replace("$extra", "gpu")
    options = re.findall(r"--(?:build-)?(?:constraint|override) constraints/\S+", text)
    assert len(options) == 4
    for option in options:
        assert option in setup.replace('"', "") and (ROOT / option.split()[1]).is_file()


def test_what_is_built_for_another_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c104cuda')")
    (tmp_path / "flash_attn-2.8.3.dist-info").mkdir()
    (tmp_path / "flash_attn-2.8.3.dist-info" / "METADATA").write_text("Name: flash_attn\nVersion: 2.8.3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)  # where there is one, another test has loaded it
    with pytest.raises(ConfigError, match=rf"does not load \(undefined symbol: _ZN3c104cuda\); install .*: {UV}"):
        check_packages(composed("+experiment=qwen3_4b"))


def test_another_flash_attn_is_not_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn-4 puts its files into the package flash_attn too."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn_4-4.0.0b15.dist-info").mkdir()
    (tmp_path / "flash_attn_4-4.0.0b15.dist-info" / "METADATA").write_text("Name: flash-attn-4\nVersion: 4.0.0b15\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert packages._problem("flash-attn-4") == ""
    with pytest.raises(ConfigError, match="flash-attn is needed on GPUs, but is not installed"):
        check_packages(composed("+experiment=qwen3_4b"))


def test_attention_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match=rf"sdpa: with {ULYSSES}>1 each GPU would see only its own part of a row"):
        check_packages(composed("+experiment=qwen3_coder_30b", f"{ATTENTION}=sdpa"))
    check_packages(composed("+experiment=qwen3_4b", f"{ATTENTION}=sdpa"))
    with pytest.raises(ConfigError, match=r"attn_implementation=flash_attention: take flash_attention_2, flash"):
        check_packages(composed("+experiment=qwen3_4b", f"{ATTENTION}=flash_attention"))


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), True), ((9, 0), False)])
def test_flash_attention_4_needs_hopper(
    capability: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pynvml

    gpu = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetCudaComputeCapability=lambda handle: capability,
        nvmlDeviceGetName=lambda handle: "a GPU",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=80 * 2**30),
    )
    for name, value in vars(gpu).items():
        monkeypatch.setattr(pynvml, name, value)
    monkeypatch.setattr(packages, "_problem", lambda package: "")
    config = composed("+experiment=qwen3_4b", f"{ATTENTION}=flash_attention_4")
    if refused:
        with pytest.raises(ConfigError, match="needs Hopper or newer, and this is a GPU; take flash_attention_2"):
            check_packages(config)
    else:
        check_packages(config)


@pytest.mark.parametrize("rows", [[5, 3, 4], [12]])
def test_sdpa_keeps_packed_rows_apart(rows: list[int]) -> None:
    """verl packs rows without a mask; transformers finds their borders in the position ids."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3Config(**sizes, num_key_value_heads=2, head_dim=8, vocab_size=64, attn_implementation="sdpa")
    model = AutoModelForCausalLM.from_config(config).eval()
    parts = [torch.randint(0, 64, (1, length)) for length in rows]
    positions = torch.cat([torch.arange(length) for length in rows])[None]
    with torch.no_grad():
        alone = [model(input_ids=part, use_cache=False).logits for part in parts]
        packed = model(
            input_ids=torch.cat(parts, dim=1), attention_mask=None, position_ids=positions, use_cache=False
        ).logits
    assert torch.allclose(packed, torch.cat(alone, dim=1), atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_plan_knows_what_a_run_without_flash_attn_keeps(dtype: str) -> None:
    """verl's own cross entropy runs, token by token; this environment has no flash-attn."""
    import torch
    from verl.utils.torch_functional import FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE, logprobs_from_logits

    from tests.activations import Alive

    assert not FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE
    tokens, vocabulary = 64, 5000
    logits = torch.randn(tokens, vocabulary, dtype=getattr(torch, dtype), requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.long)
    with Alive([logits, labels]) as alive:
        made = logits * 1  # as a model's output
        torch.autograd.grad(logprobs_from_logits(made, labels).sum(), made)
    config = composed("+experiment=qwen3_4b", f"{ATTENTION}=flash_attention_4")
    trainer = replace(layout_of(config).trainer, computed=logits.element_size())
    shape = replace(shape_of(load_config("Qwen3-8B"), "Qwen3-8B"), vocabulary=vocabulary, hidden=0)
    planned = memory.head(shape, trainer, tokens, backward=True)
    assert planned == pytest.approx(alive.peak, rel=0.03)
    assert memory.head(shape, replace(trainer, flash=True), tokens, backward=True) < 0.7 * planned
