"""Linear maps of one input, and a row added to all rows: fake kernels and autograd."""

from __future__ import annotations

import torch

from ._registration import below_autograd, register_autograd_kernel, register_fake

_ops = torch.ops.edgeless


@register_fake("edgeless::project")
def _project_fake(x, weights, biases):
    return [x.new_empty((x.size(0), weight.size(0))) for weight in weights]


@register_fake("edgeless::project_backward")
def _project_backward_fake(grads, x, weights, needs):
    like = [x, *weights, *(weight[:, 0] for weight in weights)]
    return [x.new_empty(t.shape if need else (0,)) for t, need in zip(like, needs)]


@register_fake("edgeless::add_row")
def _add_row_fake(x, row):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, maps, *parameters):
        weights, biases = parameters[:maps], parameters[maps:]
        with below_autograd():
            outs = _ops.project(x, weights, biases)
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        x, *weights = ctx.saved_tensors
        need_x, _, *need = ctx.needs_input_grad
        if torch.is_grad_enabled():  # to be differentiated once more
            found = _plain_backward(grads, x, weights)
        else:
            found = _ops.project_backward(grads, x, weights, [need_x, *need])
        grad_x, *rest = (g if needed else None for g, needed in zip(found, (need_x, *need)))
        return grad_x, None, *rest


def _plain_backward(grads, x, weights):
    grads = [x.new_zeros(x.size(0), w.size(0)) if g is None else g for g, w in zip(grads, weights)]
    grad_x = sum(g @ w for g, w in zip(grads, weights))
    return [grad_x, *(g.t() @ x for g in grads), *(g.sum(0) for g in grads)]


class _AddRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, row):
        with below_autograd():
            return _ops.add_row(x, row)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.sum(0) if ctx.needs_input_grad[1] else None


def _project(x, weights, biases):
    return list(_Project.apply(x, len(weights), *weights, *biases))


register_autograd_kernel("project", _project)
register_autograd_kernel("add_row", lambda x, row: _AddRow.apply(x, row))
