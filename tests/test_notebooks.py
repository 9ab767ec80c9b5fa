"""The notebooks run from scratch on each backend, and lie in the repository as such a run left them.

`python tests/test_notebooks.py [NAME...]` runs them on the reference and writes the outputs in place. What they teach is
asserted by themselves, in their last cells.
"""

from __future__ import annotations

import copy
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("nbclient", reason="nbclient is not installed")

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from traitlets import default
from traitlets.config import Config

import lmcache_ref

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
AGAIN = "run `python tests/test_notebooks.py`"
MOST_CELLS = 26
CELL_TIMEOUT_SECONDS = 240
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
MACHINE_PATH = re.compile(r"""(?:^|[\s'"(=:])(?:/\w+/|[A-Z]:\\)|site-packages""")


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


class ThisInterpreter(AsyncKernelManager):
    """`python3` is the kernel of this interpreter, whatever kernels are installed."""

    @default("kernel_spec_manager")
    def _kernel_spec_manager_default(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])


def run(notebook: NotebookNode, backend: str) -> NotebookNode:
    """A copy of `notebook`, executed by a new kernel in an empty folder. Raises CellExecutionError.

    The kernel has this lmcache_ref, and talks through files where it can, so that no two runs meet at a port.
    """
    notebook = copy.deepcopy(notebook)
    with tempfile.TemporaryDirectory() as folder:
        config = Config()
        config.AsyncKernelManager.connection_file = f"{folder}/kernel.json"
        config.AsyncKernelManager.transport = "tcp" if os.name == "nt" else "ipc"
        environment = {
            **os.environ,
            "LMCACHE_BACKEND": backend,
            "PYTHONPATH": str(Path(lmcache_ref.__file__).parent.parent),
            "PYTHONWARNINGS": "ignore:IProgress not found",
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "IPYTHONDIR": folder,
            "HF_HUB_OFFLINE": "1",
        }
        NotebookClient(
            notebook,
            config=config,
            kernel_manager_class=ThisInterpreter,
            kernel_name="python3",
            timeout=CELL_TIMEOUT_SECONDS,
            record_timing=False,
            resources={"metadata": {"path": folder}},
        ).execute(env=environment)
    return notebook


def normal_form(notebook: NotebookNode) -> str:
    """The text of the file, free of what differs from run to run: times, versions, ids, how streams were cut."""
    notebook = copy.deepcopy(notebook)
    notebook.metadata = {**KERNEL, "language_info": {"name": "python"}}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for index, cell in enumerate(notebook.cells):
        cell.id, cell.metadata, cell.source = f"cell-{index:02}", {}, cell.source.rstrip()
    for cell in code_cells(notebook):
        outputs: list[NotebookNode] = []
        for output in cell.outputs:
            last = outputs[-1] if outputs else {}
            if output.output_type == "stream" and output.name == last.get("name"):
                last["text"] += output.text
            else:
                outputs.append(output)
            if "metadata" in output:
                output.metadata = {}
        cell.outputs = outputs
    return nbformat.writes(notebook) + "\n"


def faults(notebook: NotebookNode) -> list[str]:
    """What a notebook in the repository may not be."""
    cells = code_cells(notebook)
    found = []
    if not 0 < len(notebook.cells) <= MOST_CELLS:
        found.append(f"{len(notebook.cells)} cells")
    if not cells or not re.search(r"^assert ", cells[-1].source, re.MULTILINE):
        found.append("the last code cell asserts nothing")
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        found.append("not run from top to bottom")
    for number, cell in enumerate(cells, 1):
        if "print(" in cell.source and "def " not in cell.source and not cell.outputs:
            found.append(f"In[{number}] prints and has no output")
        figures = [output for output in cell.outputs if "image/png" in output.get("data", {})]
        if len(figures) != cell.source.count("plt.show()"):
            found.append(f"In[{number}] has {len(figures)} figures")
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                found.append(f"In[{number}] has an output of kind {output.get('name', 'error')}")
            if MACHINE_PATH.search(output.get("text", "")):
                found.append(f"In[{number}] shows a path of the machine")
    return found


def printed(notebook: NotebookNode) -> list[str]:
    """What each code cell prints, numbers and spaces aside: drawn weights may change with the version of a library."""
    texts = (
        "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
        for cell in code_cells(notebook)
    )
    return [re.sub(r"[\d\s]+", " ", text) for text in texts]


def test_the_notebooks_are_there() -> None:
    assert {"1_paged_kv_cache.ipynb", "2_the_specification.ipynb"} <= {path.name for path in NOTEBOOKS}


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_scratch_and_prints_what_is_committed(path: Path, backend: str) -> None:
    committed = read(path)
    executed = run(committed, backend)
    assert [cell.execution_count for cell in code_cells(executed)] == [c.execution_count for c in code_cells(committed)]
    assert printed(executed) == printed(committed), AGAIN


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_with_its_outputs_in_normal_form(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert faults(notebook) == [], AGAIN
    assert path.read_text(encoding="utf-8") == normal_form(notebook), AGAIN


# The checks above, each seen to fail


def example(*sources: str) -> NotebookNode:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])


def test_an_assertion_made_false_is_an_error() -> None:
    notebook = read(FOLDER / "2_the_specification.ipynb")
    last = code_cells(notebook)[-1]
    last.source, changed = re.subn(r"^assert (.*)$", r"assert not (\1)", last.source, count=1, flags=re.MULTILINE)
    assert changed == 1
    with pytest.raises(CellExecutionError, match="AssertionError"):
        run(notebook, "reference")


def test_the_backend_asked_for_is_the_one_that_runs() -> None:
    with pytest.raises(CellExecutionError, match=r"(?s)BackendError.*no_such"):
        run(example("from lmcache_ref import get_backend", "get_backend()"), "no_such")


def test_the_kernel_is_this_interpreter_whatever_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoy = tmp_path / "kernels" / "python3" / "kernel.json"
    decoy.parent.mkdir(parents=True)
    decoy.write_text('{"argv": ["false"], "display_name": "another", "language": "python"}', encoding="utf-8")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    source = "import sys, lmcache_ref; print(sys.executable, lmcache_ref.__file__, end='')"
    (cell,) = run(example(source), "auto").cells
    assert cell.outputs[0].text == f"{sys.executable} {lmcache_ref.__file__}"


def _with_first_output(**changes: object) -> NotebookNode:
    notebook = read(FOLDER / "1_paged_kv_cache.ipynb")
    cell = next(cell for cell in code_cells(notebook) if cell.outputs)
    cell.outputs[0].update(changes)
    return notebook


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"name": "stderr"}, "of kind stderr"),
        ({"text": "read /home/me/model\n"}, "a path of the machine"),
        ({"output_type": "error", "name": "error"}, "of kind error"),
        ({"data": {"image/png": ""}}, "has 1 figures"),
    ],
)
def test_an_output_that_may_not_be_is_found(changes: dict[str, object], fault: str) -> None:
    (found,) = faults(_with_first_output(**changes))
    assert fault in found


def test_missing_outputs_and_assertions_are_found() -> None:
    notebook = read(FOLDER / "1_paged_kv_cache.ipynb")
    cells = code_cells(notebook)
    shown = [cell for cell in cells if "plt.show()" in cell.source]
    assert len(shown) == 3
    for cell in cells:
        cell.outputs = []
    cells[-1].source = "print('done')"
    cells[0].execution_count = None
    found = faults(notebook)
    assert sum("has 0 figures" in fault for fault in found) == 3
    assert sum("prints and has no output" in fault for fault in found) == sum("print(" in c.source for c in cells)
    assert "the last code cell asserts nothing" in found and "not run from top to bottom" in found
    assert faults(example()) == ["0 cells", "the last code cell asserts nothing"]


def test_another_text_is_another_print_and_other_numbers_are_not() -> None:
    committed = printed(read(FOLDER / "1_paged_kv_cache.ipynb"))
    assert printed(_with_first_output(text="layers: many")) != committed
    cell = next(cell for cell in code_cells(_with_first_output()) if cell.outputs)
    assert printed(_with_first_output(text=cell.outputs[0].text.replace("100", "99"))) == committed


def test_normal_form_drops_what_a_run_leaves_behind() -> None:
    path = FOLDER / "1_paged_kv_cache.ipynb"
    notebook = read(path)
    notebook.metadata.language_info.version = "3.99"
    cell = next(cell for cell in code_cells(notebook) if cell.outputs)
    cell.id, cell.source = "f00", cell.source + "\n"
    cell.metadata = {"execution": {"iopub.execute_input": "2000-01-01T00:00:00"}}
    begin, end = copy.deepcopy(cell.outputs[0]), copy.deepcopy(cell.outputs[0])
    begin.text, end.text = cell.outputs[0].text[:5], cell.outputs[0].text[5:]
    cell.outputs = [begin, end]
    assert nbformat.writes(notebook) + "\n" != path.read_text(encoding="utf-8")
    assert normal_form(notebook) == path.read_text(encoding="utf-8")


def main(names: list[str]) -> None:
    """Run the notebooks and write them."""
    for path in NOTEBOOKS:
        if not names or path.name in names or path.stem in names:
            executed = run(read(path), "reference")
            path.write_text(normal_form(executed), encoding="utf-8")
            print(path.name, *faults(executed), sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
