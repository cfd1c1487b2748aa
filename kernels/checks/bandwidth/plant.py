import subprocess, sys, shutil, os, tempfile
from pathlib import Path

R = Path(__file__).resolve().parents[3]
W = Path(tempfile.mkdtemp())
for d in ("alpha", "kernels"):
    shutil.copytree(R / d, W / d, ignore=shutil.ignore_patterns("__pycache__"))
HERE = W / "kernels/checks/bandwidth"
F = [
    ("common/reduce.cuh", "            parity_ ^= 1;", "            ;", "norm"),
    ("norm/backward.cu", "if (real) {", "if (true) {", "norm"),
    ("norm/backward.cu", "to.x[r][k].clear();", "", "norm"),
    ("norm/forward.cu", "a[k].clear();", "", "norm"),
    ("loss/cross_entropy.cu", "row += static_cast<int>(gridDim.x), parity ^= 1", "row += static_cast<int>(gridDim.x)", "loss"),
    ("optimizer/step.cu", "i + s < p.blocks", "i + s <= p.blocks", "update"),
    ("embedding/backward.cu", "if (slot == CAPACITY)", "if (slot == CAPACITY - 1)", "emb"),
    ("rope/rope.cu", "cosine[(N + i) / 2]", "cosine[i / 2]", "rope"),
    ("elementwise/columns.cu", "min(p.rows, (part + 1) * p.run)", "(part + 1) * p.run", "cols"),
    ("elementwise/columns.cu", "if (warp < N)", "if (warp < 4)", "cols"),
    ("elementwise/dropout.cu", "(N / 4)", "1", "ew"),
    ("elementwise/map.cu", "if (group < whole)", "", "ew"),
    ("common/philox.cuh", "round < 10", "round < 9", "ew"),
    ("norm/backward.cu", "now = next;", "", "norm"),
    ("norm/backward.cu", "min(first + r, stop - 1)", "first + r", "norm"),
    ("norm/forward.cu", "LAYER ? a[k][i] : a[k][i] * a[k][i]", "a[k][i] * a[k][i]", "norm"),
]
env = dict(os.environ)
for f, a, b, p in F:
    src = (R / "kernels" / f).read_text()
    if a not in src:
        print("NOMATCH", f, a)
        continue
    (W / "kernels" / f).write_text(src.replace(a, b, 1))
    try:
        r = subprocess.run([sys.executable, str(HERE / "check.py"), p.split("-")[0]], capture_output=True, text=True, timeout=200)
        out = r.stdout.strip().splitlines()[-1:]
        caught = r.returncode != 0 or "bad 0" not in (out[0] if out else "")
    except subprocess.TimeoutExpired:
        caught = True
        out = ["timeout"]
    print("caught" if caught else "SURVIVED", f, a[:40].replace("\n", " "), out, flush=True)
    (W / "kernels" / f).write_text(src)
