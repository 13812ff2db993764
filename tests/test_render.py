"""Templates are Python with names to fill in; what they give is Python that needs nothing else."""

from __future__ import annotations

import ast
import builtins
import functools
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import scoremod
from scoremod import parse, variants
from scoremod.attend_cpu import source as cpu_source
from scoremod.attend_hopper import of_options, plans
from scoremod.attend_hopper import source as hopper_source
from scoremod.attend_triton import source as triton_source
from scoremod.backends.triton import TRITON
from scoremod.backward_cpu import source as cpu_backward_source
from scoremod.ir.ops import Type
from scoremod.plan import (
    CpuBackwardPlan,
    CpuPlan,
    assumed_params,
    cpu_backward_plan,
    cpu_plan,
    typed,
)
from scoremod.plan_hopper import HopperPlan
from scoremod.plan_hopper_backward import HopperBackwardPlan, SmallPlan
from scoremod.plan_hopper_wide import WidePlan
from scoremod.plan_structure import StructurePlan, structure_plan
from scoremod.plan_triton import Options, TritonPlan, triton_plan
from scoremod.plan_triton_backward import BackwardPlan, DeltaPlan, PlacesPlan
from scoremod.render import render
from scoremod.resources import path
from scoremod.target import INTERPRETER, parse_target

TEMPLATES = sorted(path("templates").glob("*/*.jinja"))


def name(template: Path) -> str:
    return f"{template.parent.name}/{template.name.removesuffix('.jinja')}"


def as_python(template: str) -> str:
    """The template with each {{ ... }} read as a name of its own; statements are comments."""
    holes = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
    lines = [line for line in template.splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines)
    # A list of parameters brings its comma: `(q, k{{ plan.params }})`.
    text = re.sub(r"(?<=[\w)}])\{\{ *plan\.(\w*params|gradients) *\}\}", r", \1", text)
    return holes.sub(lambda hole: re.sub(r"\W+", "_", hole[1]).strip("_"), text)


@pytest.mark.parametrize("template", TEMPLATES, ids=name)
def test_a_template_parses_as_python(template: Path) -> None:
    ast.parse(as_python(template.read_text()))


@pytest.mark.parametrize("template", TEMPLATES, ids=name)
def test_a_template_only_writes_a_plan_down(template: Path) -> None:
    text = template.read_text()
    for statement in re.findall(r"^\s*#%\s*(.*)$", text, re.MULTILINE):
        assert re.fullmatch(
            r"for \w+ in [a-z]\w*(\.\w+)+|if [a-z]\w*(\.\w+)*|else|endif|endfor"
            r'|include "\w+\.py\.jinja"',
            statement,
        ), statement
    for value in re.findall(r"\{\{\s*(.*?)\s*\}\}", text):
        assert re.fullmatch(r"\w+(\.\w+)*", value), value


PLANS: dict[str, type[Any]] = {
    "cpu/attention_bwd.py": CpuBackwardPlan,
    "cpu/attention_fwd.py": CpuPlan,
    "hopper/attention_bwd.py": HopperBackwardPlan,
    "hopper/attention_bwd_finish.py": SmallPlan,
    "hopper/attention_bwd_keys.py": WidePlan,
    "hopper/attention_bwd_queries.py": WidePlan,
    "hopper/attention_bwd_ranks.py": SmallPlan,
    "hopper/attention_bwd_rows.py": SmallPlan,
    "hopper/attention_bwd_sums.py": WidePlan,
    "hopper/attention_fwd.py": HopperPlan,
    "hopper/steps_by_keys.py": HopperBackwardPlan,
    "hopper/steps_by_queries.py": WidePlan,
    "triton/attention_fwd.py": TritonPlan,
    "triton/attention_bwd_delta.py": DeltaPlan,
    "triton/attention_bwd_diagonals.py": BackwardPlan,
    "triton/attention_bwd_dkdv.py": BackwardPlan,
    "triton/attention_bwd_dq.py": BackwardPlan,
    "triton/attention_bwd_pairs.py": BackwardPlan,
    "triton/capture_places.py": PlacesPlan,
    "triton/tile_structure.py": StructurePlan,
}


def test_every_template_has_a_plan_and_every_plan_a_template() -> None:
    assert set(PLANS) == set(map(name, TEMPLATES))


@pytest.mark.parametrize("template", TEMPLATES, ids=name)
def test_a_template_names_fields_of_its_plan(template: Path) -> None:
    made = PLANS[name(template)]
    known = {f.name for f in fields(made)} | set(dir(made))
    text = template.read_text()
    for included in re.findall(r'#% include "(.*)"', text):
        text += (template.parent / included).read_text()
    assert set(re.findall(r"\bplan\.(\w+)", text)) <= known


@pytest.mark.parametrize("folder", sorted({t.parent for t in TEMPLATES}), ids=lambda f: f.name)
def test_every_shared_step_is_used(folder: Path) -> None:
    steps = {
        n.name
        for n in ast.parse((folder / "tile.py").read_text()).body
        if isinstance(n, ast.FunctionDef)
    }
    texts = [(folder / "tile.py").read_text(), *(t.read_text() for t in folder.glob("*.jinja"))]
    texts.append((Path(scoremod.__file__).parent / "backends" / f"{folder.name}.py").read_text())
    for step in steps:
        # The spelling adds the number of indices, or the type, to a name.
        word = re.sub(r"_(\d|float)$", "_?", step)
        uses = sum(len(re.findall(rf"\b{word}", text)) for text in texts)
        assert uses > 1, f"{folder.name}/tile.py: nothing uses {step}"


# -- what is rendered --------------------------------------------------------------------------

SAID = {
    "noop": parse("variant noop() { mask True }"),
    "causal": variants.causal,
    "alibi": variants.alibi & variants.causal,
    "gemma": variants.softcap & variants.sliding_window,
    "t5": variants.t5_bias,
    "documents": variants.document & variants.causal,
    "flashmask": variants.flashmask_intervals,
    "sinks": variants.sink_window,
    "volume": variants.neighborhood_3d,
}
OPTIONS = [
    Options("f16", 64, 64),
    Options("bf16", 80, 128, small=False, wide_offsets=True, has_kv_lens=True,
            keeps_residual=True),
    Options("f32", 17, 31, "exact", offset_per_batch=True, scale_in_memory=True, short=True,
            positive_scale=False, aligned=False),
]  # fmt: skip


@functools.cache
def texts(variant: Any) -> list[str]:
    program = variant._program
    known = typed(program, assumed_params(program), ("what the user wrote",))
    found = [cpu_source(cpu_plan(known, float64=x, has_kv_lens=x)) for x in (False, True)]
    learned = tuple(p.type is Type.FLOAT for p in known.params)
    for wanted in ((True, True, True, *learned), (False, False, True, *(False for _ in learned))):
        plan = cpu_backward_plan(known, float64=False, has_kv_lens=True, wanted=wanted)
        found.append(cpu_backward_source(plan))
    for target in (INTERPRETER, parse_target("cuda:90"), parse_target("hip:gfx942")):
        for options in OPTIONS:
            options = replace(options, stored=not known.half_lines)
            found.append(triton_source(triton_plan(known, options, target)))
            if target.arch == "90" and options.dtype != "f32":
                chosen = of_options(known, replace(options, head_dim=64, v_head_dim=128))
                made = plans(known, chosen, target)
                found += [hopper_source(plan) for plan in made[:2]]
            if options.stored:
                structure = structure_plan(known, options, target, 64, 32)
                found.append(render("tile_structure.py", structure, TRITON))
    return found


GLUON = {"triton.experimental", "triton.experimental.gluon"}
GLUON |= {"triton.experimental.gluon.language.nvidia.hopper"}
TRITON_MODULES = ({"triton", "triton.language"}, GLUON, GLUON | {"triton.language"})


@pytest.mark.parametrize("said", SAID)
def test_rendered_text_is_python_that_needs_nothing_else(said: str) -> None:
    for text in texts(SAID[said]):
        tree = ast.parse(text)
        imported = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        modules = {getattr(n, "module", n.names[0].name) for n in imported}
        assert modules in ({"torch"}, *TRITON_MODULES)
        assert undefined(tree) == set()


def undefined(tree: ast.Module) -> set[str]:
    """Names that are read but neither defined in the text nor built in."""
    known = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            known |= {
                node.name,
                *(a.arg for a in node.args.args),
                *(a.arg for a in node.args.kwonlyargs),
            }
            known |= {a.arg for a in (node.args.vararg, node.args.kwarg) if a}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            known |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.arg):
            known.add(node.arg)
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} - known


@pytest.mark.parametrize("said", SAID)
def test_rendered_text_reads_well(said: str) -> None:
    for text in texts(SAID[said]):
        assert text.startswith("# ") and text.endswith("\n") and not text.endswith("\n\n")
        assert "{{" not in text and "#%" not in text and "##" not in text and "\n\n\n\n" not in text
        assert "what the user wrote" in text
        assert all(line == line.rstrip() for line in text.splitlines())
        functions = [n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
        assert functions[-1] in ("attention_fwd", "attention_bwd", "tile_structure")
        assert len(set(functions)) == len(functions)


def test_the_users_functions_and_captures_are_named() -> None:
    program = (variants.alibi & variants.sliding_window)._program
    for text in texts(variants.alibi & variants.sliding_window):
        functions = [n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
        masks = {f"{program.name}_mask", f"{program.name}_keys_0"}  # a window may be its ends alone
        # What is added to s may be its parts.
        scores = {f"{program.name}_score", f"{program.name}_score_per_key"}
        assert scores & set(functions) and masks & set(functions)
        assert re.search(r"\bslopes\b", text) and re.search(r"\bwindow\b", text)


def test_a_plain_mask_has_no_score_function_and_a_score_no_mask_function() -> None:
    for text in texts(variants.causal):
        assert "causal_mask" in text and "causal_score" not in text
    for text in texts(variants.softcap):
        assert "softcap_score" in text and "softcap_mask" not in text
    for text in texts(SAID["noop"]):
        assert "noop_" not in text


def test_only_the_steps_that_are_called_are_copied() -> None:
    for text in texts(variants.causal):
        assert "def ilog2" not in text and "def load" not in text and "def remainder" not in text


def test_generic_element_types_are_assumed() -> None:
    attn = parse(
        "variant v(t: float[Lk], d: int[L], keep: bool[Lk]) "
        "{ score s + t[j] mask d[j] == d[i] and keep[j] }"
    )
    for target in ("cuda:90", "cpu"):
        ast.parse(attn.source(head_dim=64, target=target))


def test_the_backward_is_shown_too() -> None:
    attn = variants.softcap.then(variants.alibi) & variants.causal
    text = attn.source(head_dim=64, target="cpu", phase="bwd")
    assert "def attention_bwd(" in text and "slopes_grad" in text and "cap_grad" in text
    text = attn.source(head_dim=64, phase="bwd")
    ast.parse(text)
    # On Hopper those of dq, dk and dv first; learned captures take the portable ones.
    for kernel in ("_rows", "", "_finish", "_delta", "_dkdv", "_dq"):
        assert f"def attention_bwd{kernel}(" in text
    assert "def attention_bwd_dq(" not in variants.causal.source(head_dim=64, phase="bwd")
    assert "def attention_bwd(" not in attn.source(head_dim=64, target="cuda:80", phase="bwd")
    assert "def attention_bwd_diagonals(" in variants.t5_bias.source(head_dim=64, phase="bwd")


def test_equal_plans_give_equal_text() -> None:
    assert texts(variants.t5_bias) == texts(variants.t5_bias)


# Captures that are called like something in a kernel.
@pytest.mark.parametrize(
    "word", ["offs_m", "acc", "load", "torch", "tl", "m_i", "where", "b_", "start_m", "o", "lse"]
)
def test_a_capture_may_be_called_like_a_name_of_the_kernel(word: str) -> None:
    import torch
    from attention_cases import BACKENDS, Shape, compare, tensors

    attn = parse(f"variant v({word}, n) {{ score s + {word}[j] + n }}")
    scalar = parse(f"variant v(t, {word}: float) {{ score s * {word} + t[j] }}")
    qkv, table = tensors(Shape(1, 2, 1, 5, 7)), torch.randn(7)
    for backend in BACKENDS:
        compare(attn, qkv, backend, **{word: table, "n": 1})
        compare(scalar, qkv, backend, **{"t": table, word: 2.0})
