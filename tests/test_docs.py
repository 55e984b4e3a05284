"""What the README and the docs show: every command runs, every snippet runs, every file loads, every link leads on."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel

from commands import COMMANDS, ROOT, assert_80_columns
from placewise import _schemas, cli, engines, planners, verify
from placewise.driver import plan as plan_of
from placewise.files import load_cluster, load_graph, load_plan, load_problem

PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))]
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 100, "max_position_embeddings": 8192,
}  # fmt: skip
#: So that a page takes seconds: what a command is given besides, or instead; but a few evaluations are as many.
FEW = 300
SHORT = {
    "plan": ("--budget", "0.3s"), "compare": ("--budget", "0.1s"), "profile": ("--budget", "0.3s"),
    "train": ("--evaluations", "50"), "verify": ("--budget", "0.1s", "--within", "1000"),
}  # fmt: skip


def fences(path: str, language: str) -> list[str]:
    text = (ROOT / path).read_text()
    return [body for found, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if found == language]


def commands_of(page: str) -> list[str]:
    """Lines of unmarked blocks that begin with a command; a table of times may begin so, too."""
    lines = [line for block in fences(page, "") for line in block.splitlines()]
    return [line for line in lines if re.match(rf"placewise ({'|'.join(COMMANDS)}) (?!.*  )", line + " ")]


def test_the_readme_shows_every_command():
    assert {line.split()[1] for line in commands_of("README.md")} == set(COMMANDS)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """The files that the pages speak of as the reader's own, small."""
    import onnx
    import openvino
    import torch

    folder = tmp_path_factory.mktemp("models")
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    torch.export.save(torch.export.export(module, (torch.ones(8, 8),)), folder / "model.pt2")
    x, y = (onnx.helper.make_tensor_value_info(name, 1, ["batch", 8]) for name in "xy")
    weight = onnx.helper.make_tensor("w", 1, [8, 8], [0.5] * 64)
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    graph = onnx.helper.make_graph([node], "model", [x], [y], [weight])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10),
              folder / "model.onnx")  # fmt: skip
    ends = [onnx.helper.make_tensor_value_info(name, 1, [8, 8]) for name in "xz"]
    relu = onnx.helper.make_node("Relu", ["y"], ["z"], name="relu")
    graph = onnx.helper.make_graph([node, relu], "model", ends[:1], ends[1:], [weight])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10),
              folder / "fixed.onnx")  # fmt: skip
    openvino.save_model(openvino.convert_model(module, example_input=torch.ones(8, 8), input=[[8, 8]]),
                        folder / "model.xml")  # fmt: skip
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "Meta-Llama-3-8B").mkdir()
    (folder / "Meta-Llama-3-8B" / "config.json").write_text(json.dumps(LLAMA))
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)])
def test_the_commands_of_a_page_run(run, models, page, monkeypatch):
    monkeypatch.setattr(verify, "_WARM_UP", 1)
    monkeypatch.setattr(verify, "_LEAST", 1)
    shutil.copytree(models, ".", dirs_exist_ok=True)
    for name, text in zip(("box.yaml", "graph.json"), (*fences(page, "yaml"), *fences(page, "json")), strict=False):
        Path(name).write_text(text)
    printed = ""
    for line in commands_of(page):
        args = shlex.split(line, comments=True)[1:]
        result = run(*args, *(SHORT.get(args[0], ()) if f"--evaluations {FEW} " not in line else ()))
        if "cuda:" in line and result.code == 2:
            assert "CUDA" in result.err  # there is none here
            continue
        assert result.code == 0, f"{line}: {result.err}"
        printed += result.out
        if args[0] != "export":
            assert_80_columns(result.out)
    assert [text for text in fences(page, "text") if text not in printed] == []


def test_commands_within_sentences_are_known():
    """They are not run, as they name what the reader has; but there are such commands, with such options."""
    commands = typer.main.get_command(cli.app).commands
    told = [line for page in PAGES for line in re.findall(r"`placewise ([a-z]+ [^`]+)`", (ROOT / page).read_text())]
    assert len(told) > 15
    for line in told:
        name, *args = shlex.split(line)
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert {arg for arg in args if arg.startswith("-")} <= known, line


def rows_of(table: str) -> dict[str, tuple[str, float]]:
    """Value and gap of each planner in what `compare` prints."""
    rows = re.findall(r"^\| [ >*] (\S+) +\| +([\d.]+ \w+) \| +([\d.]+)% \|", table, re.M)
    return {name: (value, float(gap)) for name, value, gap in rows}


@pytest.mark.parametrize("page", ["docs/compare.md", "docs/unequal-gpus.md"])
def test_a_table_shows_what_its_command_prints(run, page):
    """For the planners that take no time; what the others prove can only make the gaps smaller."""
    args = shlex.split(next(line for line in commands_of(page) if line.startswith("placewise compare ")))[1:]
    shown = rows_of(next(block for block in fences(page, "") if block.startswith("| planner ")))
    named = args.index("--planners") + 1
    assert set(args[named].split(",")) == set(shown)
    quick = shown.keys() & {"single", "blocks-by-load", "blocks-by-memory", "heft"}
    args[named] = ",".join(quick)
    printed = rows_of(run(*args).out)
    assert printed.keys() == quick
    for name, (value, gap) in printed.items():
        assert shown[name][0] == value
        assert shown[name][1] <= gap


def test_a_quoted_plan_is_what_its_command_prints(run):
    """Of the page on pipelines, in full: its plan is proved to be the best, and takes a second."""
    (shown,) = [block for block in fences("docs/pipelines.md", "") if block.startswith("bert-base on four-gpus: ")]
    assert shown in run(*shlex.split(commands_of("docs/pipelines.md")[0])[1:]).out


def test_every_engine_has_a_page():
    """In the table of engines, and with commands that are for it."""
    table = (ROOT / "docs/engines.md").read_text()
    rows = re.findall(r"^\| \[`([\w.-]+)`\]\(engines/([\w.-]+)\.md\) \|", table, re.M)
    assert sorted(rows) == [(name, name) for name in engines.available()]
    for name in engines.available():
        told = [line.split() for line in commands_of(f"docs/engines/{name}.md")]
        assert any(line[1] == "plan" and name in line for line in told)
        assert any(line[1] == "export" and name in line for line in told)


def test_the_python_of_the_readme_runs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    five_lines, example = fences("README.md", "python")
    exec(five_lines, {})
    assert load_plan("plan.json").planner == "heft"
    assert example.strip() in (ROOT / "examples/my_planner.py").read_text()


def test_the_example_runs_and_beats_random(monkeypatch):
    done = subprocess.run([sys.executable, ROOT / "examples/my_planner.py"], capture_output=True, text=True, check=True)
    assert "by sweep" in done.stdout
    monkeypatch.setattr(planners, "_registered", planners.available())
    runpy.run_path(str(ROOT / "examples/my_planner.py"))
    for model in ("inception-v3", "llama-3-8b", "llama-3-8b-decode"):
        ours, random = (plan_of(load_problem(model, "two-gpus-one-host"), name).value for name in ("sweep", "random"))
        assert ours < random


def test_the_planner_of_the_docs_runs():
    (code,) = fences("docs/add-a-planner.md", "python")
    script = (
        code
        + """
import placewise as pw
print(pw.plan(pw.load_problem("inception-v3", "four-gpus"), "my-idea", budget=pw.Budget(evaluations=20)).summary())
"""
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "by my-idea" in done.stdout


def test_the_python_page_of_the_docs_runs(tmp_path):
    """Every snippet, one after the other, as a reader would type them."""
    script = "\n".join(fences("docs/python-api.md", "python"))
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "inception-v3 on two-gpus-one-host" in done.stdout


def test_the_files_of_the_docs_load(tmp_path):
    graph, whole, instance, partitioning = fences("docs/file-formats.md", "json")
    (tmp_path / "graph.json").write_text(graph)
    assert load_graph(tmp_path / "graph.json").num_edges == 2
    for name, text in (("whole", whole), ("instance", instance), ("partitioning", partitioning)):
        (tmp_path / f"{name}.json").write_text(text)
        assert plan_of(load_problem(tmp_path / f"{name}.json"), "single").value > 0
    for page in ("docs/file-formats.md", "README.md"):
        (cluster,) = fences(page, "yaml")
        (tmp_path / "box.yaml").write_text(cluster)
        assert load_cluster(tmp_path / "box.yaml").device_names == ("gpu0", "cpu")


def test_the_tables_of_the_file_formats_name_every_key():
    """And no other: one table after the other, as the page has them."""

    def keys(schema: type[BaseModel], within: str = "") -> set[str]:
        return {within + (field.alias or name) for name, field in schema.model_fields.items()}

    data = _schemas
    expected = [
        keys(data.GraphData) - {"ops", "tensors"} | keys(data.Ops, "ops.") | keys(data.Tensors, "tensors."),
        keys(data.ClusterData),
        keys(data.DeviceData),
        keys(data.LinkData),
        keys(data.ProblemData) - {"costs", "constraints"}
        | keys(data.CostsData, "costs.")
        | keys(data.ConstraintsData, "constraints."),
        keys(data.ExecutionData),
        keys(data.PlanData),
    ]
    text = (ROOT / "docs/file-formats.md").read_text()
    tables = re.findall(r"^\| key .*\n\|[-|]+\n((?:\|.*\n)+)", text, re.M)
    for table, known in zip(tables, expected, strict=False):  # those of other programs' files come last
        named = " ".join(row.split("|")[1] for row in table.splitlines())
        assert set(re.findall(r"`([\w.]+)`", named)) == known


def test_links_in_the_documents_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_pictures_are_drawn_by_make_pictures():
    """Each by a script, or by a command of the page, that names it."""
    target = (ROOT / "Makefile").read_text().split("\npictures:")[1].split("\n\n")[0]
    scripts = [*re.findall(r"\S+\.py", target), "docs/compare.md"]  # whose commands it runs
    known = target + "".join((ROOT / script).read_text() for script in scripts)
    for page in PAGES:
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / page).read_text()):
            picture = (ROOT / page).parent / target
            assert re.search(rf"(?<!\]\(){re.escape(picture.name)}", known), f"{page}: {target}"
            assert picture.stat().st_size < 150_000


def test_the_readme_leads_to_every_page():
    named = re.findall(r"^\| \[(docs/[\w-]+\.md)\]", (ROOT / "README.md").read_text(), re.M)
    assert sorted(named) == sorted(f"docs/{page.name}" for page in ROOT.glob("docs/*.md"))
