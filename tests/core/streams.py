"""A side stream that is late, for tests on CUDA."""

import torch


def on_a_late_stream(x, call):
    """``call(late)`` on another stream, for a copy of ``x`` that needs a gradient and is written there late."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.full_like(x, float("nan"))
        torch.cuda._sleep(20_000_000)  # whoever does not wait for this stream reads NaN
        late.copy_(x.detach())
        found = call(late.requires_grad_())
    torch.cuda.current_stream().wait_stream(stream)
    return found
