"""The tests that run first after a change to a source.

The first pattern that matches the source decides. If these tests pass, all others run.
"""

from __future__ import annotations

from fnmatch import fnmatch

_PLANS = "core/test_plan*.py core/test_engines.py shared/test_plan_command.py core/test_longest_cuda.py"
_CACHE = "shared/test_cache*.py shared/test_leak.py"
_SUMS = "core/test_spmm.py core/test_sum_layer.py core/test_graph_rows.py core/test_typed_rows.py core/test_wsb.py"
_RELATIONS = "core/test_relational_*.py core/test_typed_*.py core/test_pair_*.py core/test_segment_tiles.py"
_ATTENTION = "core/test_attention*.py core/test_cosine_attention.py core/test_edge_features.py core/test_logits.py"
_PARTS = "shared/test_parts.py shared/test_carriers.py shared/test_cache_distributed.py"
_EVERY_PYG = "pyg/test_pyg_random*.py pyg/test_pyg_parity.py pyg/test_pyg_inputs.py pyg/test_pyg_fallback.py"
_EVERY_DGL = "dgl/test_dgl_random*.py dgl/test_dgl_parity.py dgl/test_dgl_layer.py dgl/test_dgl_explain.py"

# Pattern of the source's path -> patterns of tests.
WATCHERS = [
    ("shared/programs/in_place.py", "pyg/test_generated_edge_updates.py dgl/test_dgl_generated*.py"),
    (
        "shared/programs/*.py",
        "pyg/test_generated_*.py core/test_message_passing.py core/test_program*.py core/test_compiled_walks.py "
        "core/test_attention_programs.py",
    ),
    ("shared/functional/message_passing.py", "core/test_message_passing.py core/test_program_keys.py"),
    ("pyg_plugin/generated.py", "pyg/test_generated_*.py"),
    ("pyg_plugin/messages.py", "pyg/test_generated_*.py"),
    ("pyg_plugin/edge_values.py", "pyg/test_generated_edge_updates.py"),
    ("pyg_plugin/plain_edges.py", "pyg/test_generated_layers.py pyg/test_generated_edge_updates.py"),
    ("pyg_plugin/forwards.py", "pyg/test_generated_forwards.py pyg/test_generated_layers.py"),
    ("pyg_plugin/recalled.py", "pyg/test_generated_recalled.py pyg/test_generated_keys.py"),
    ("shared/plan/*.py", f"{_PLANS} core/test_relational_plan.py"),
    (
        "shared/functional/map_order.py",
        f"pyg/test_pyg_map_order.py dgl/test_dgl_map_order.py core/test_map_order.py {_PLANS}",
    ),
    ("shared/*cache*.py", f"{_CACHE} core/test_arguments.py core/test_graph_compile.py pyg/test_pyg_compile.py"),
    ("shared/graph/formats.py", f"{_CACHE} core/test_formats.py core/test_graph.py"),
    ("shared/capture/*.py", "shared/test_capture*.py pyg/test_pyg_batches.py"),
    ("shared/graph/deferred_checks.py", "shared/test_capture_step*.py"),
    ("pyg_plugin/batches.py", "pyg/test_pyg_batches.py"),
    ("shared/padding/__init__.py", "pyg/test_pyg_loader.py pyg/test_pyg_gps.py dgl/test_dgl_loader.py"),
    ("shared/padding/sizes.py", "pyg/test_pyg_loader.py dgl/test_dgl_loader.py"),
    ("shared/padding/dense_rows.py", "pyg/test_pyg_gps.py"),
    ("shared/padding/masked_norm.py", "shared/test_masked_norm.py"),
    ("pyg_plugin/loader.py", "pyg/test_pyg_loader*.py"),
    ("dgl_plugin/dataloading.py", "dgl/test_dgl_loader.py"),
    ("shared/choices/scoped.py", "shared/test_backends.py core/test_engines.py"),
    (
        "shared/choices/backends.py",
        "shared/test_backends.py shared/test_accelerate.py shared/test_calls.py pyg/test_pyg_fallback.py",
    ),
    ("shared/choices/gpus.py", "shared/test_gpus.py"),
    (
        "shared/layers/adapter.py",
        f"core/test_projection.py shared/test_backends.py {_EVERY_PYG} dgl/test_dgl_explain.py",
    ),
    ("shared/layers/accelerate.py", "shared/test_accelerate.py pyg/test_pyg_report.py"),
    ("shared/layers/calls.py", "shared/test_calls.py pyg/test_pyg_report.py dgl/test_dgl_explain.py"),
    ("shared/layers/explanation.py", "shared/test_calls.py shared/test_backends.py"),
    ("shared/layers/call_errors.py", "pyg/test_pyg_bad_calls.py dgl/test_dgl_bad_calls.py"),
    ("pyg_plugin/joined.py", "pyg/test_pyg_report.py"),
    ("shared/choices/engines.py", f"core/test_engines.py {_PLANS}"),
    ("shared/choices/tuning*.py", "core/test_tuning.py shared/test_tune_command.py"),
    ("shared/graph/wsb.py", "core/test_wsb*.py core/test_blocks.py"),
    ("shared/blocks.py", "core/test_blocks.py"),
    (
        "shared/graph/fingerprint.py",
        "core/test_blocks.py core/test_tuning.py core/test_graph.py shared/test_damaged*.py",
    ),
    ("shared/files/json_files.py", "core/test_tuning.py shared/test_damaged_parts.py"),
    ("shared/reordering/*", "core/test_reorder.py shared/test_reorder_command.py"),
    ("shared/distributed/store*.py", "shared/test_damaged_parts.py shared/test_parts.py"),
    ("shared/distributed/*", f"{_PARTS} pyg/test_pyg_parts.py dgl/test_dgl_parts.py"),
    ("shared/prefetch.py", "core/test_prefetch.py"),
    ("shared/functional/projection.py", f"core/test_projection*.py core/test_small_sums.py {_EVERY_PYG}"),
    ("shared/functional/aggregation.py", f"{_SUMS} core/test_arguments.py pyg/test_pyg_sums*.py"),
    ("shared/kernels/*", "shared/test_kernel*.py shared/test_compile_command.py core/test_kernels.py"),
    ("shared/functional/attention.py", f"{_ATTENTION} core/test_large_logits.py shared/test_parts.py"),
    ("shared/functional/edge_options.py", f"{_ATTENTION} core/test_arguments.py"),
    ("shared/functional/dropout.py", f"{_ATTENTION} core/test_pair_attention.py pyg/test_pyg_dropout.py"),
    ("shared/reference/__init__.py", f"{_ATTENTION} {_SUMS} core/test_reduction.py {_RELATIONS}"),
    ("shared/layers/hetero_sum.py", "core/test_hetero_sum.py pyg/test_pyg_hetero_conv.py dgl/test_dgl_hetero.py"),
    ("shared/*relational*.py", f"{_RELATIONS} core/test_random_f*.py pyg/test_pyg_rgcn.py dgl/test_dgl_relational.py"),
    ("shared/graph/typed.py", f"{_RELATIONS} pyg/test_pyg_rgcn.py"),
    ("shared/functional/pair_*.py", f"{_RELATIONS} pyg/test_pyg_rgat.py"),
    ("shared/functional/*.py", f"{_ATTENTION} core/test_arguments.py core/test_reduction.py core/test_large_logits.py"),
    ("shared/graph/rows.py", "core/test_graph_rows.py pyg/test_pyg_sums.py"),
    ("shared/graph/*.py", "core/test_graph*.py core/test_arguments.py core/test_reorder.py shared/test_cache.py"),
    ("shared/checks.py", "core/test_arguments.py core/test_graph*.py"),
    ("shared/*", "core/test_*.py"),
    ("pyg_plugin/every_pair.py", "pyg/test_pyg_every_pair.py shared/test_cache_keys.py"),
    (
        "pyg_plugin/*neighbors.py",
        "pyg/test_pyg_sums*.py pyg/test_pyg_map_order.py pyg/test_pyg_random.py pyg/test_pyg_refusals.py",
    ),
    ("pyg_plugin/*hetero*.py", "pyg/test_pyg_hetero*.py pyg/test_pyg_hgt.py shared/test_cache_keys.py"),
    ("pyg_plugin/*hgt*.py", "pyg/test_pyg_hgt.py pyg/test_pyg_random_relations.py"),
    ("pyg_plugin/*_node_maps.py", "pyg/test_pyg_hgt.py pyg/test_pyg_random_relations.py"),
    ("pyg_plugin/*rgat*.py", "pyg/test_pyg_rgat.py pyg/test_pyg_random_relations.py"),
    ("pyg_plugin/*rgcn*.py", "pyg/test_pyg_rgcn.py pyg/test_pyg_random_relations.py"),
    ("pyg_plugin/*relations.py", "pyg/test_pyg_rg*.py pyg/test_pyg_random_relations.py shared/test_cache_keys.py"),
    ("pyg_plugin/*aggr.py", "pyg/test_pyg_aggr.py shared/test_cache_keys.py"),
    ("pyg_plugin/*transforms.py", "pyg/test_pyg_transforms.py"),
    ("pyg_plugin/*agnn*.py", f"pyg/test_pyg_agnn.py {_EVERY_PYG}"),
    (
        "pyg_plugin/*",
        f"{_EVERY_PYG} pyg/test_pyg_sums*.py pyg/test_pyg_errors.py pyg/test_pyg_ids.py pyg/test_pyg_refusals.py",
    ),
    ("dgl_plugin/mailbox.py", "dgl/test_dgl_generated*.py"),
    ("dgl_plugin/record*.py", "dgl/test_dgl_generated*.py"),
    ("dgl_plugin/generated.py", "dgl/test_dgl_generated*.py dgl/test_dgl_module.py"),
    ("dgl_plugin/deferred.py", "dgl/test_dgl_generated*.py"),
    ("dgl_plugin/expressions.py", "dgl/test_dgl_generated*.py"),
    ("dgl_plugin/computing.py", "dgl/test_dgl_generated*.py"),
    ("dgl_plugin/*hetero*.py", "dgl/test_dgl_hetero.py shared/test_cache_keys.py"),
    ("dgl_plugin/*ops.py", "dgl/test_dgl_ops.py dgl/test_dgl_relational.py"),
    ("dgl_plugin/*transforms.py", "dgl/test_dgl_transforms.py"),
    ("dgl_plugin/*convert.py", "dgl/test_dgl_convert.py shared/test_cache_dgl.py"),
    ("dgl_plugin/*sageconv.py", f"dgl/test_dgl_map_order.py dgl/test_dgl_sums.py {_EVERY_DGL}"),
    ("dgl_plugin/*hgtconv.py", "dgl/test_dgl_hgt.py dgl/test_dgl_random_relations.py"),
    ("dgl_plugin/*ginconv.py", f"dgl/test_dgl_map_order.py dgl/test_dgl_sums.py {_EVERY_DGL}"),
    ("dgl_plugin/nn/graphconv.py", f"dgl/test_dgl_map_order.py dgl/test_dgl_sums.py {_EVERY_DGL}"),
    ("dgl_plugin/*rel*.py", "dgl/test_dgl_rel*.py dgl/test_dgl_random_relations.py"),
    ("dgl_plugin/*", f"{_EVERY_DGL} dgl/test_dgl_sums.py dgl/test_dgl_agnn.py dgl/test_dgl_hgt.py"),
    ("core_cuda/attention/*", f"{_ATTENTION} core/test_large*.py core/test_b*.py core/test_arguments.py"),
    ("core_cuda/reduction/*", "core/test_reduction*.py core/test_batched_gradients.py"),
    ("core_cuda/spmm/*", f"{_SUMS} core/test_bounds_on_the_cpu.py"),
    ("core_cuda/projection/*", "core/test_projection.py"),
    ("core_cuda/relational/*", _RELATIONS),
    ("core_cuda/pair_attention/*", "core/test_pair_*.py pyg/test_pyg_rgat.py"),
    ("core_cuda/graph/*", "core/test_graph*.py core/test_formats.py shared/test_cache.py"),
    ("core_cuda/layer/*", "core/test_*_layer.py"),
    ("core_cuda/common/cpu/pool*", "core/test_pool.py"),
    ("core_cuda/*", f"{_ATTENTION} {_SUMS} core/test_reduction.py core/test_projection.py {_RELATIONS}"),
]


def watchers_of(file: str) -> list[str]:
    """Patterns, below ``tests``, of the tests that run first after a change to a source."""
    return next(tests.split() for pattern, tests in WATCHERS if fnmatch(file, pattern))
