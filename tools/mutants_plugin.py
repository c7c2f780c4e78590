"""A pytest plugin of `tools/mutants`: records the mutants whose statements each test runs, or runs
tests under each mutant.

A server collects all tests once. For each request it forks; the child gives functions the code of
the mutant, runs the tests, and answers with the first failure. Code that runs at import cannot be
changed in this way, and is rejected.
"""

from __future__ import annotations

import ast
import gc
import json
import os
import select
import signal
import sys
import warnings
from collections import defaultdict
from contextlib import suppress
from types import CodeType, FunctionType

import pytest

FOLDER = os.environ["MUTANTS_FOLDER"]

# ---- The map -------------------------------------------------------------------------------------

if "MUTANTS_MAP" in os.environ:
    from mutants_probes import reached

    def _processor() -> tuple[float, float]:
        times = os.times()
        return times.user + times.system, times.children_user + times.children_system

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(item, nextitem):
        reached.clear()
        os.environ["MUTANTS_TEST"] = item.nodeid
        own, others = _processor()
        yield
        del os.environ["MUTANTS_TEST"]
        now = _processor()
        row = [item.nodeid, now[0] - own, now[1] - others, sorted(reached)]
        with open(os.path.join(FOLDER, f"tests-{os.getpid()}"), "a") as file:
            file.write(json.dumps(row) + "\n")


# ---- The server ----------------------------------------------------------------------------------

else:
    first_failure = ""

    def pytest_runtest_logreport(report):
        global first_failure
        if report.failed and not first_failure:
            first_failure = report.nodeid

    def pytest_runtestloop(session):
        """Answer requests, one line of JSON each, until there are no more."""
        items = {item.nodeid: item for item in session.items}
        requests, answers = (int(number) for number in os.environ["MUTANTS_PIPES"].split())
        with os.fdopen(requests) as lines, os.fdopen(answers, "w") as out:
            if _has_threads_of_jax():
                raise RuntimeError("a module of tests runs JAX at import: its forks would hang")
            print(json.dumps({"collected": len(items)}), file=out, flush=True)
            for line in lines:
                print(json.dumps(_answer(session, items, json.loads(line))), file=out, flush=True)
        return True

    def _has_threads_of_jax():
        """Return whether JAX has started its threads, which the children would lack."""
        bridge = sys.modules.get("jax._src.xla_bridge")
        return bridge is not None and bridge.backends_are_initialized()

    def _answer(session, items, request):
        """Run the tests of a request in a child; return the first test that fails, does not end or
        ends the process, "" if none, or why the mutant cannot run.
        """
        unknown = [test for test in request["tests"] if test not in items]
        if unknown:
            return {"cannot": f"no such tests: {unknown[:3]}"}
        read, write = os.pipe()
        # The child writes the name of the test that runs, in case that it hangs.
        running = os.memfd_create("running")
        with warnings.catch_warnings():
            # JAX warns of any fork; as an error it would fail the first test.
            warnings.simplefilter("ignore")
            child = os.fork()
        if not child:
            os.setpgid(0, 0)
            os.close(read)
            answer = ""
            try:
                tests = [items[test] for test in request["tests"]]
                answer = json.dumps(_run(session, tests, request, running))
            finally:
                os.write(write, answer.encode())
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as result:
            ended, _, _ = select.select([result], [], [], request["seconds"])
            answer = result.read() if ended else ""
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # including processes that its tests left behind
        os.waitpid(child, 0)
        with os.fdopen(running, "rb") as file:
            file.seek(0)
            unfinished = file.read().decode()
        if answer:
            return json.loads(answer)
        return {"failed": unfinished or "pytest ended"}

    def _run(session, items, request, running):
        if request["path"]:
            try:
                _change(os.path.realpath(request["path"]), request["before"], request["after"])
            except ValueError as error:
                return {"cannot": str(error)}
        for index, item in enumerate(items):
            os.ftruncate(running, 0)
            os.pwrite(running, item.nodeid.encode(), 0)
            following = items[index + 1] if index + 1 < len(items) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if first_failure:
                break
        return {"failed": first_failure}

    def _functions(code, found=None):
        """Return the code objects of all functions in code, by qualified name, in source order."""
        found = defaultdict(list) if found is None else found
        for each in code.co_consts:
            if isinstance(each, CodeType):
                found[each.co_qualname].append(each)
                _functions(each, found)
        return found

    def _change(path, before, after):
        """Replace the code of all functions of a module by the code of a changed source."""
        old, new = (_functions(compile(source, path, "exec")) for source in (before, after))
        if _outside(before) != _outside(after):
            raise ValueError("the change is outside of functions")
        changed = {}
        for name, codes in old.items():
            for one, other in zip(codes, new[name], strict=True):
                if _shape(one) != _shape(other):
                    changed[name, one.co_firstlineno] = other
        done = 0
        for function in gc.get_objects():
            if (
                isinstance(function, FunctionType)
                and os.path.realpath(function.__code__.co_filename) == path
            ):
                code = changed.get(
                    (function.__code__.co_qualname, function.__code__.co_firstlineno)
                )
                if code is not None:
                    function.__code__ = code  # ValueError if it closes over other variables
                    done += 1
        if not done:
            raise ValueError("no function has this code")

    def _shape(code):
        """Return code without its source positions."""
        constants = [
            _shape(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts
        ]
        return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants

    def _outside(source):
        """Return the part of a source that runs at import."""
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = []
            elif isinstance(node, ast.Lambda):
                node.body = ast.Constant(None)
        return ast.dump(tree)
