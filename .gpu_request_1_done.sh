# about 100 s: cuda-marked tests of captured steps, then Cora 2-layer GCN and GATv2 with Adam: PyG, ours eager, captured
export OMP_NUM_THREADS=2
timeout 70 python -m pytest -m cuda tests/shared/test_capture_step_cuda.py tests/shared/test_capture_cuda.py -q -n 12 -p no:cacheprovider 2>&1 | grep -v "^  " | tail -90
cat > /tmp/time_small.py <<'P'
import copy, time, torch, edgeless, torch_geometric.nn as stock, edgeless.pyg.nn as ours
import torch.nn.functional as F
torch.manual_seed(0)
n, e = 2708, 10556
ei = torch.randint(n, (2, e), device="cuda"); x = torch.randn(n, 1433, device="cuda"); y = torch.randint(7, (n,), device="cuda")
class Net(torch.nn.Module):
    def __init__(self, nn, kind):
        super().__init__()
        if kind == "GCNConv": self.a, self.b = nn.GCNConv(1433, 16), nn.GCNConv(16, 7)
        else: self.a, self.b = nn.GATv2Conv(1433, 8, heads=8), nn.GATv2Conv(64, 7)
    def forward(self, x, ei):
        return self.b(F.dropout(F.elu(self.a(F.dropout(x, 0.5, self.training), ei)), 0.5, self.training), ei)
def timed(step, n=200):
    for _ in range(20): step()
    torch.cuda.synchronize(); t = time.perf_counter()
    for _ in range(n): step()
    torch.cuda.synchronize(); return 1e3 * (time.perf_counter() - t) / n
for kind in ("GCNConv", "GATv2Conv"):
    for name, nn in (("pyg", stock), ("ours", ours), ("captured", ours), ("pyg captured", stock)):
        torch.manual_seed(0)
        model = Net(nn, kind).cuda(); opt = torch.optim.Adam(model.parameters(), lr=0.01)
        def step():
            opt.zero_grad(); loss = F.cross_entropy(model(x, ei), y); loss.backward(); opt.step(); return loss
        if "captured" in name: step = edgeless.capture_step(step, model=model, optimizer=opt)
        ms = timed(step)
        host = 0
        if "captured" in name:
            t = time.perf_counter(); 
            for _ in range(50): step()
            host = 1e3 * (time.perf_counter() - t) / 50; torch.cuda.synchronize()
        print(f"{kind} {name}: {ms:.3f} ms a step, host {host:.3f}", step if "captured" in name else "", flush=True)
P
timeout 40 python /tmp/time_small.py
