"""The list of kernels for the pack that a wheel carries, and where the pack is found."""

import re
from pathlib import Path

from usual_kernels import LIST, OF_PLANS, of_logs, of_plans

from edgeless.kernels import headers, read_log


def test_kernels_of_the_list_are_defined_where_it_says():
    """By their names; `tox -e kernels` compiles them all."""
    written = {}
    for kernel in read_log(LIST):
        if kernel.header not in written:
            file = headers.sources() / kernel.header
            included = re.findall(r'^#include "([^"]+)"', file.read_text(), re.MULTILINE)
            places = [file, *((file.parent / name).resolve() for name in included)]
            written[kernel.header] = "".join(place.read_text() for place in places if place.suffix == ".cuh")
        name = kernel.expression.partition("<")[0].rpartition(":")[2]
        assert re.search(rf"\b{name}\(", written[kernel.header]), kernel


def test_plans_name_no_kernel_that_the_list_lacks():
    listed = set(read_log(LIST))
    assert of_plans() <= listed, "run tests/packaging/usual_kernels.py with a log of the GPU tests"
    assert {k for k in listed if OF_PLANS.fullmatch(k.header)} == of_plans()


def test_the_list_is_that_of_its_own_log(tmp_path):
    assert of_logs([LIST]) | of_plans() == set(read_log(LIST))
    (tmp_path / "log").write_text(
        "spmm/cuda/product.cuh\tedgeless::k<double>\tsm_90\nspmm/cuda/product.cuh\tedgeless::k<float>\tsm_90\n"
        "attention/cuda/mma_forward.cuh\tedgeless::k<float>\tsm_90\n"
    )
    assert [kernel.expression for kernel in of_logs([tmp_path / "log"])] == ["edgeless::k<float>"]


def test_tox_puts_the_pack_where_the_package_finds_it(root):
    from edgeless.kernels import pack

    assert "--kernels tests/packaging/usual_kernels.log" in (root / "tox.ini").read_text()
    assert "--out shared/kernels/kernels.pack" in (root / "tox.ini").read_text()
    assert '"edgeless.kernels": ["kernels.pack"]' in (root / "setup.py").read_text()
    assert "shared/kernels/kernels.pack" in (root / ".gitignore").read_text().splitlines()
    assert 'with_name("kernels.pack")' in Path(pack.__file__).read_text()
