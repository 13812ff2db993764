"""The command line: what each command prints, exit codes, and never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from scoremod import cache
from scoremod.cli import emit, main

GEMMA = """variant gemma2(window: int = 4096, cap: float = 50.0, doc: tensor[B, L]) {
  score cap * tanh(s / cap)
  mask  j <= i and i - j < window and doc[b, i] == doc[b, j]
}
"""
MODULE = """
import scoremod

@scoremod.mask
def near(i, j, w: int):
    return abs(i - j) <= w

class Block:
    mask = near & scoremod.variants.causal

def plain(i, j):
    return j <= i
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a `.smod` file, a module and tables, and an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCOREMOD_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "gemma2.smod").write_text(GEMMA)
    (tmp_path / "wrong.smod").write_text("variant w() { mask i - j }\n")
    (tmp_path / "attn_of_cli.py").write_text(MODULE)
    (tmp_path / "broken_of_cli.py").write_text("1 / 0\n")
    np.save(tmp_path / "doc.npy", np.array([[0, 0, 1, 1]]))
    torch.save(torch.tensor([[0, 1, 1, 1]]), tmp_path / "doc.pt")
    torch.save({"doc": 1}, tmp_path / "dict.pt")
    (tmp_path / "text.npy").write_text("no array")
    sys.modules.pop("attn_of_cli", None)
    return tmp_path


def scoremod(*args: str, **options: Any) -> Result:
    result = CliRunner().invoke(main, args, **options)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    assert "\x1b" not in result.output, "no colours in a pipe"
    return result


def output(*args: str, **options: Any) -> str:
    result = scoremod(*args, **options)
    assert result.exit_code == 0, result.output
    return result.stdout


# -- commands ----------------------------------------------------------------------------------


def test_show() -> None:
    assert output("show", "gemma2.smod", "--set", "window=8") == (
        "variant gemma2\n" + "".join(f"  {line}\n" for line in GEMMA.splitlines()) + "simplified\n"
        "  score  cap * tanh(s / cap)\n"
        "  mask   j <= i and i - j < window and doc[b, i] == doc[b, j]\n"
        "captures\n"
        "  window: int = 8\n"
        "  cap: float = 50.0\n"
        "  doc: tensor[B, L]   assumed i32; a call decides\n"
    )


def test_show_what_captures_nothing() -> None:
    assert output("show", "causal").endswith("  mask   j <= i\ncaptures nothing\n")


def test_show_for_a_machine() -> None:
    found = json.loads(output("show", "gemma2.smod", "--json"))
    assert found["name"] == "gemma2"
    assert found["score"] == "cap * tanh(s / cap)"
    assert [c["name"] for c in found["captures"]] == ["window", "cap", "doc"]
    assert found["captures"][2]["assumed"] == "i32"
    assert found["captures"][2]["dims"] == ["B", "L"]
    assert found["captures"][0]["default"] == 4096


def test_a_variant_of_a_module_in_this_folder() -> None:
    assert "near(i, j, w: int)" in output("show", "attn_of_cli:near")
    assert "variant near_and_causal" in output("show", "attn_of_cli:Block.mask")


def test_standard_input() -> None:
    assert "variant gemma2" in output("show", "-", input=GEMMA)


def test_explain_names_what_has_no_value() -> None:
    text = output("explain", "gemma2.smod")
    assert "cap * tanh(s / cap)" in text
    assert "no value yet: doc: tensor[B, L]" in text
    assert "no value yet" not in output("explain", "gemma2.smod", "--set", "doc=doc.npy")


def test_tiles() -> None:
    text = output("tiles", "causal", "--len", "8", "--block-m", "2", "--block-n", "4")
    assert text.splitlines()[:4] == ["/.", "/.", "#/", "#/"]


@pytest.mark.parametrize("file", ["doc.npy", "doc.pt"])
def test_tiles_with_a_table_of_a_file(file: str) -> None:
    text = output(
        *("tiles", "document", "--len", "4", "--block-m", "1", "--block-n", "1", "--json"),
        *("--set", f"doc={file}"),
    )
    found = json.loads(text)
    first = 2 if file == "doc.npy" else 1
    expected = [[2 * ((i < first) == (j < first)) for j in range(4)] for i in range(4)]
    assert found["kind"] == expected
    assert found["counts"]["partial"] == 0


def test_tiles_of_other_lengths_and_offsets() -> None:
    where = ("--len", "2", "--kv-len", "4", "--q-offset", "2", "--block-m", "1", "--block-n", "1")
    found = json.loads(output("tiles", "causal", *where, "--json"))
    assert found["kind"] == [[2, 2, 2, 0], [2, 2, 2, 2]]
    assert (found["q_len"], found["kv_len"], found["q_offset"]) == (2, 4, 2)


def test_tiles_of_one_batch_and_head() -> None:
    np.save("prefix.npy", np.array([1, 3]))
    where = ("--len", "4", "--block-m", "4", "--block-n", "1", "--set", "prefix=prefix.npy")
    first = json.loads(output("tiles", "prefix_lm", *where, "--json"))
    second = json.loads(output("tiles", "prefix_lm", *where, "--b", "1", "--json"))
    assert (first["kind"], second["kind"]) == ([[2, 1, 1, 1]], [[2, 2, 2, 1]])


def test_tiles_as_a_picture() -> None:
    pytest.importorskip("matplotlib")
    output("tiles", "causal", "--len", "256", "-o", "causal.png")
    assert Path("causal.png").read_bytes().startswith(b"\x89PNG")


def test_source_is_python() -> None:
    text = output("source", "gemma2.smod", "--head-dim", "64", "--dtype", "f16")
    compile(text, "kernel.py", "exec")
    assert "triton" in text
    assert "torch" in output("source", "alibi", "--target", "cpu")


def test_source_with_another_element() -> None:
    assert "assumed: doc holds i32" in output("source", "document")
    assert "assumed" not in output("source", "document", "--capture", "doc=i64")


def test_the_cache() -> None:
    assert output("cache", "list").startswith("0 kernels, 0 B, in ")
    assert json.loads(output("cache", "size", "--json"))["bytes"] == 0
    Path("cache").mkdir(exist_ok=True)
    (Path("cache") / f"{'ab' * 32}{cache.SUFFIX}").write_bytes(b"damaged")
    assert json.loads(output("cache", "list", "--json"))[0]["size"] == 7
    assert "7 B of " in output("cache", "size")
    result = scoremod("cache", "verify", "--json")
    assert (result.exit_code, json.loads(result.stdout)["damaged"]) == (1, ["ab" * 32])
    assert output("cache", "verify") == "0 of 0 kernels are whole\n"
    assert output("cache", "clear") == "0 kernels deleted\n"


def test_source_is_highlighted_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    emit("def f(): pass", "python")
    assert capsys.readouterr().out == "def f(): pass\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    emit("def f(): pass", "python")
    assert "\x1b[" in capsys.readouterr().out


# -- help --------------------------------------------------------------------------------------

COMMANDS = ["", "show", "explain", "tiles", "source", "cache"]
CACHE = ["cache list", "cache size", "cache clear", "cache verify"]


@pytest.mark.parametrize("command", [*COMMANDS, *CACHE])
def test_help_has_an_example(command: str) -> None:
    text = output(*command.split(), "--help")
    assert f"Example:\n    scoremod {command}".rstrip() in text


def test_version() -> None:
    assert output("--version").startswith("scoremod, version 0.")


def test_completion_knows_stock_variants() -> None:
    def complete(word: str) -> list[str]:
        found = ShellComplete(main, {}, "scoremod", "_SCOREMOD_COMPLETE").get_completions(
            ["show"], word
        )
        return [item.value if item.type == "plain" else item.type for item in found]

    assert complete("sliding") == ["sliding_window", "sliding_tile"]
    assert complete("gem") == ["file"]


# -- mistakes ----------------------------------------------------------------------------------

MISTAKES = [
    ("show cusal", "no stock variant `cusal`", "did you mean causal?"),
    ("show gemma", "no stock variant `gemma`", "did you mean gemma2.smod?"),
    ("show gema2.smod", "there is no file gema2.smod", "did you mean gemma2.smod?"),
    ("show .", "no stock variant `.`", "give a .smod file, module:name, or one of: a_shape"),
    ("show wrong.smod", "wrong.smod:1:20", "compare it, or use `score`"),
    ("show doc.npy", "doc.npy is not UTF-8 text", ""),
    ("show no_such_module:x", "cannot import `no_such_module`: ModuleNotFoundError", ""),
    ("show broken_of_cli:x", "cannot import `broken_of_cli`: ZeroDivisionError", ""),
    ("show attn_of_cli:far", "`attn_of_cli` has no `far`", "it has near"),
    ("show attn_of_cli:plain", "is no variant, but function", "@scoremod.mask"),
    ("show causal --set x=1", "`x` is not a capture", "it has none"),
    ("show softcap --set cop=1", "`cop` is not a capture", "did you mean cap?"),
    ("show softcap --set cap=much", "'much' is no number, and no .npy or .pt file", ""),
    ("show sliding_window --set window=2.5", "the capture `window`", "declared as window: int"),
    ("tiles document --len 4", "needs values of doc: tensor[B, L]", "--set doc=FILE.npy"),
    ("tiles chunked --len 4 --set chunk=none.npy", "there is no file none.npy", ""),
    ("tiles document --len 4 --set doc=text.npy", "cannot read a tensor from text.npy", ""),
    ("tiles document --len 4 --set doc=dict.pt", "dict.pt holds no tensor, but dict", ""),
    ("tiles document --len 9 --set doc=doc.npy", "the capture `doc`", "doc: tensor[B, L]"),
    ("tiles causal --len 2000000000", "tiles", "take larger --block-m and --block-n"),
    ("tiles causal --len 9 -o no_folder/x.png", "cannot draw into no_folder/x.png", ""),
    ("source causal --dtype f99", "'f99' is not a dtype", ""),
    ("source causal --target gpu", "no target 'gpu'", "cuda:90"),
    ("source causal --head-dim 0", "head_dim must be an int from 1", ""),
    ("source document --capture dog=i64", "`dog` is not a capture", "did you mean doc?"),
]


@pytest.mark.parametrize(("command", "message", "hint"), MISTAKES)
def test_a_mistake_is_told_with_exit_code_1(command: str, message: str, hint: str) -> None:
    result = scoremod(*command.split())
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert hint in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        "shw causal",
        "show",
        "show causal --no-such-option",
        "show causal --set window",
        "tiles causal",
        "tiles causal --len -1",
        "tiles causal --len x",
        "tiles causal --len 4 --block-m 0",
        "source causal --phase sideways",
        "source causal --capture doc",
        "cache empty",
    ],
)
def test_wrong_usage_has_exit_code_2(command: str) -> None:
    result = scoremod(*command.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage: " in result.stderr


# -- the process -------------------------------------------------------------------------------


def test_python_dash_m() -> None:
    command = [sys.executable, "-m", "scoremod", "show", "wrong.smod"]
    root = Path(__file__).parent.parent
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={"PYTHONPATH": str(root)}
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == (
        "error: a mask must give a bool, but this is int\n"
        "  wrong.smod:1:20, in variant `w`\n"
        "    1 | variant w() { mask i - j }\n"
        "      |                    ^^^^^\n"
        "  hint: compare it, or use `score` if it changes the score\n"
    )
