"""Make the quickstart's policy: a small random Qwen3 or Qwen3.5, dense or with experts, with its own tokenizer.

    python -m rl.quickstart.policy --out DIR --seed S [--experts N] [--hybrid]

The result is a Hugging Face model directory: Qwen3ForCausalLM, with experts Qwen3MoeForCausalLM; hybrid, the same of
Qwen3.5 in its published form, which also reads images. The weights are random (the seed sets them, but not the
tokenizer); a byte-level BPE that can encode any text without loss; and the chat
template of template.jinja (Qwen3-Coder's tool calls). The BPE is trained on generated text of the kind that the policy
will see, so that an episode is a few hundred tokens long. The same arguments give the same bytes.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rl.quickstart.script import SUBMIT, sed
from rl.quickstart.tasks import CANDIDATES, FUNCTIONS, MODULES
from rollout import program

TEMPLATE = Path(__file__).with_name("template.jinja")
_LIMIT = "{%- set limit = 100 -%}\n"

# Qwen's names and order. The tags of tool calls and thinking are not "special" in Qwen's tokenizers either: they stay
# in the text when special tokens are skipped, and parsers look for them there.
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
VOCABULARY = 2048

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16384,
    # Six times the usual 0.02: a network this narrow then learns to copy names several times sooner.
    "initializer_range": 0.12,
}
# What a policy with experts has in addition. Two experts are active; together they are as wide as the dense MLP.
MOE_SHAPE: dict[str, Any] = {
    "moe_intermediate_size": 192,
    "num_experts_per_tok": 2,
    # as in Qwen3-Coder-30B-A3B
    "norm_topk_prob": True,
}
# What a hybrid policy has in addition: three layers of linear attention (a gated delta net) and one of full attention.
HYBRID_SHAPE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    # as in all published ones; kernels know no other widths
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    # vLLM keeps the state of a sequence in this precision.
    "mamba_ssm_dtype": "float32",
}
# Its encoder of images, which no episode uses.
VISION_SHAPE: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 1,
    "out_hidden_size": SHAPE["hidden_size"],
    "num_position_embeddings": 16,
}
# Large embeddings keep the words asked for apart in the residual stream. The warm start treats these words alike (any
# expression may follow), so with embeddings as small as the other weights their last hidden states become nearly
# parallel and what reward teaches about one word spreads to all. Still larger embeddings learn the form of an edit
# badly. docs/quickstart.md has the figures.
EMBEDDING_STD = 1.0

# The pieces into which text is split before BPE: a line break (verl's Qwen builder needs "\n" to be one token
# everywhere), a tag such as <parameter=file_path>, an expression of the tasks, a word with the space or dot before it
# and the colon after it, a digit, a run of punctuation, white space. An expression is one token and directly follows
# the word asked for ("The sum: a + b"), so the only decision of an episode is one token whose predecessor determines
# it. A policy of this size learns that by reward in a few dozen updates; it does not if a dozen tokens stand in
# between.
_PIECES = (
    r"\n|</?[A-Za-z_][^<>\n]*>| ?a [-+] b\b| ?[a-z]+\(a, b\)"
    r"|[ .]?[A-Za-z_]+:?| ?[0-9]| ?[^\sA-Za-z0-9_<]+|[^\S\n]+|<"
)


def make_policy(
    out: Path,
    seed: int,
    experts: int = 0,
    head_dim: int = 32,
    multiple: int = 1,
    hybrid: bool = False,
    shell: bool = False,
) -> None:
    """Write the model directory `out`.

    experts: per layer, at least 2; 0 makes a dense model.
    head_dim: width of an attention head.
    multiple: unused tokens fill the vocabulary up to a multiple of this.
    hybrid: three of four layers are of linear attention, as in Qwen3.5.
    shell: for agents that have commands in place of Read and Edit, and long prompts: their beginnings are shown.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

    tokenizer = make_tokenizer(multiple=multiple, shell=shell)
    shape: dict[str, Any] = {
        **SHAPE,
        "vocab_size": len(tokenizer),
        "head_dim": head_dim,
        # On a CPU, vLLM's weight sync does not refresh an output layer that shares the embedding's weights.
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        **({"num_experts": experts, **MOE_SHAPE} if experts else {}),
    }
    if hybrid:
        shape |= HYBRID_SHAPE | (
            {"shared_expert_intermediate_size": MOE_SHAPE["moe_intermediate_size"]} if experts else {}
        )
        rotated = head_dim // 8  # pairs of numbers: a quarter of a head
        sections = [rotated - 2 * (rotated // 3), rotated // 3, rotated // 3]
        shape["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": sections,
            "mrope_interleaved": True,
        }
        parts = {"text_config": shape, "vision_config": VISION_SHAPE, "tie_word_embeddings": False}
        config = AutoConfig.for_model("qwen3_5_moe" if experts else "qwen3_5", **parts)
        maker = AutoModelForImageTextToText
    else:
        config, maker = AutoConfig.for_model("qwen3_moe" if experts else "qwen3", **shape), AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = maker.from_config(config).to(torch.float32)
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=EMBEDDING_STD)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".policy-", dir=out.parent) as name:
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
        out.mkdir(exist_ok=True)
        # config.json comes last: a directory without it is not a model yet.
        for file in sorted(Path(name).iterdir(), key=lambda file: file.name == "config.json"):
            os.replace(file, out / file.name)


def make_tokenizer(
    texts: Iterable[str] | None = None, multiple: int = 1, shell: bool = False
) -> PreTrainedTokenizerFast:
    """Return the tokenizer with its BPE trained on `texts` (default: generated episodes), and with unused tokens up to
    a `multiple`. (Rows of the embedding beyond the tokenizer would not do: verl forbids them to the engine only.)

    shell: as for `make_policy`.
    It is byte-level over all 256 bytes and does not normalize, so decode(encode(x)) == x for any text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Control tokens are cut out, because the BPE's trainer would learn pieces of them like any text.
    control = re.compile("|".join(map(re.escape, [*SPECIAL, *TAGS])))
    corpus = _corpus(shell) if texts is None else texts
    tokenizer.train_from_iterator((part for text in corpus for part in control.split(text)), trainer)
    unused = [f"<|unused_{number}|>" for number in range(-(tokenizer.get_vocab_size() + len(TAGS)) % multiple)]
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in (*TAGS, *unused)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=SHAPE["max_position_embeddings"],
        chat_template=_LIMIT * shell + TEMPLATE.read_text(),
    )


def _tool(name: str, *required: str, **others: str) -> dict[str, Any]:
    """Return a tool. required: its parameters that the template shows, all of them texts. others: types of more."""
    types = {**dict.fromkeys(required, "string"), **others}
    properties = {parameter: {"type": type_} for parameter, type_ in types.items()}
    schema = {"type": "object", "properties": properties, "required": [*required]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


# Those of Claude Code 2.1 in a bare session.
_EDIT = _tool("Edit", "file_path", "old_string", "new_string", replace_all="boolean")
TOOLS: list[Any] = [_EDIT, _tool("Read", "file_path")]

# Those that run a command, in Codex, in Qwen Code and Gemini CLI, in OpenCode and mini-swe-agent, and in OpenHands.
_COMMANDS = {"exec_command": "cmd", "run_shell_command": "command", "bash": "command", "terminal": "command"}
_SHELL: list[Any] = [_tool(name, parameter) for name, parameter in _COMMANDS.items()]

# What agents that run commands say in every episode: longer words make shorter prompts.
_SEEN = """
write_stdin request_user_input view_image multi_agent_v1__close_agent __resume_agent __send_input __spawn_agent
__wait_agent get_goal create_goal update_goal list_directory read_file grep_search replace write_file glob todowrite
<skills_instructions ... ssions instructions> <environment_context> <cwd>/testbed</cwd> <shell>sh</shell> <current_date>
2026-11-30</current_ ... sabled"><file_system type="unrestricted" /></permission_profile></filesystem>
</environment_context>
Chunk ID: Wall time: 0.0000 seconds Process exited with code 0 Original token count: Output: "returncode": "output":
Command: Directory: (root) Error: (none) Exit Code: Signal: Process Group PGID: </untrusted_context> (no output)
Please solve this issue: You can exec Any other command you want to run ```bash anything helpful assistant system
<SOUL> You are OpenHands ... /PROCESS_MANAGEMENT> terminal file_editor task_tracker task finish think path [The
command completed with exit code 0.] [Current working directory: /testbed] [Python interpreter: ] [Command finished
with exit code 0] opencode, an </available_skills> edit read write skill todowrite webfetch You are Qwen Code, a ...
Add the module agent list_agents notebook_edit tool_call tool_search <system-reminder> The following skills are
available for use with the Skill tool. Treat the names as ion startup context. </system-reminder> You are Gemini CLI,
licitly by the user. update_topic list_background_processes read_background_output enter_plan_mode invoke_agent
activate_skill <session_context> This is the Gemini CLI. We are setting up the context for our chat. Today's date is
├── ├ └── .git/ .gitignore </session_context>
"""

SYSTEM = (
    "You are a Claude agent, built on Anthropic's Claude Agent SDK.\n"
    "Fix the bug so that the tests pass. You repair code."
)
EDITED = (
    "The file {file} has been updated successfully. (file state is current in your context — no need to Read it back)"
)
ERRORS = (
    "<tool_use_error>String to replace not found in file.\nString: return {new}</tool_use_error>",
    "<tool_use_error>No changes to make: old_string and new_string are exactly the same.</tool_use_error>",
    "<tool_use_error>File has not been read yet. Read it first before writing to it.</tool_use_error>",
    "File does not exist. Note: your current working directory is /tmp/work.",
)


def _corpus(shell: bool = False) -> Iterator[str]:
    """Yield rendered episodes over all names and expressions. Every function name occurs equally often."""
    if shell:
        yield _SEEN
    render = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=TEMPLATE.read_text())
    cues = list(CANDIDATES)
    for number in range(4 * len(FUNCTIONS)):
        module, function = MODULES[number % len(MODULES)], FUNCTIONS[number % len(FUNCTIONS)]
        cue, bug = cues[number % len(cues)], CANDIDATES[cues[number // len(cues) % len(cues)]]
        new = CANDIDATES[cues[(number // len(cues) ** 2 + number) % len(cues)]]
        messages: Any = example_messages(module, function, cue, bug, new, number)
        which = number % (len(_SHELL) + 1)
        if shell and which < len(_SHELL):  # the rest as Claude Code plays it, which may be in a mix
            tool, parameter = list(_COMMANDS.items())[which]
            for index, command in ((2, f"cat {module}.py"), (4, sed(f"{module}.py", new)), (6, SUBMIT)):
                messages[index] = _call(tool, {parameter: command}, messages[index]["content"])
            messages[5]["content"] = ""
        yield str(render.apply_chat_template(messages, tools=_SHELL if shell else TOOLS, tokenize=False))


def example_messages(module: str, function: str, cue: str, bug: str, new: str, number: int = 0) -> list[dict[str, Any]]:
    """Return the chat of one episode in which `bug` is replaced by `new`; `cue` is the word asked for.

    If `number` is a multiple of four, the edit is answered with an error.
    """
    file = f"{module}.py"
    edited = EDITED if number % 4 else ERRORS[number // 4 % len(ERRORS)]
    edit = {"file_path": file, "old_string": f"return {bug}", "new_string": f"return {new}"}
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{function}(a, b) in {file} must return the {cue} of a and b."},
        _call("Read", {"file_path": file}),
        {"role": "tool", "content": f"1\tdef {function}(a, b):\n2\t    return {bug}\n3\t"},
        _call("Edit", edit, f"The {cue}: {new}"),
        {"role": "tool", "content": edited.format(file=file, new=new)},
        {"role": "assistant", "content": "Done."},
    ]


def _call(name: str, arguments: dict[str, Any], text: str = "") -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


def main() -> None:
    """Run the command."""
    parser = program.parser("python -m rl.quickstart.policy", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--experts", type=int, default=0, help="per layer (default: 0, a dense model)")
    parser.add_argument(
        "--hybrid", action="store_true", help="a Qwen3.5, with linear attention in three of four layers"
    )
    options = parser.parse_args()
    make_policy(options.out, options.seed, experts=options.experts, hybrid=options.hybrid)
    print(f"policy in {options.out}")


if __name__ == "__main__":
    program.end(main)
