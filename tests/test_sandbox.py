"""Honest programs score; hostile ones don't, end in time, and leave no process, no file and no zombie.

    python tests/test_sandbox.py --rounds 10    every hostile program ten times, then the honest ones' speed
"""
import argparse
import glob
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from eval import CODE, MATH, Child, run_program

ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(0, 0) == 0"]
FOLDERS = "/tmp/solution-{}-*"                                             # of the judge with this process number


@pytest.fixture(autouse=True, scope="module")
def alone():
    """The verifier of mathematics has a child too; it would be counted."""
    MATH.stop()


def processes():
    """(pid, parent, state, user) of everything."""
    lines = subprocess.run(["ps", "-eo", "pid=,ppid=,stat=,uid="], capture_output=True, text=True).stdout.splitlines()
    return [tuple(line.split()) for line in lines]


def descendants():
    """Processes below this one, besides ps."""
    found, rows = {str(os.getpid())}, processes()
    for _ in rows:
        found |= {row[0] for row in rows if row[1] in found}
    return [row for row in rows if row[0] in found and row[0] != str(os.getpid())]


def clean():
    """The next honest program scores, and nothing but the two warm processes is there."""
    assert run_program(ADD, TESTS) == (3, "")
    left = descendants()
    assert not [row for row in left if "Z" in row[2]], left
    assert len(left) <= 3, left  # M, F, ps
    assert not glob.glob(FOLDERS.format(CODE.process.pid))


def traces():
    """Files that a program might leave behind: cores, and what it wrote elsewhere."""
    return {file for place in ("", "/", "/tmp/", "/dev/shm/", "/var/tmp/") for file in glob.glob(f"{place}core*") + glob.glob(f"{place}*was-here")}


HONEST = {
    "class": ("class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
              "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)",
              ["s = Stack(); s.push(1); s.push((2, 'x')); assert len(s) == 2; assert s.pop() == (2, 'x')"]),
    "attributes": ("class Node:\n    def __init__(self, v, next=None): self.v, self.next = v, next\n"
                   "def last(n):\n    while n.next: n = n.next\n    return n.v",
                   ["n = Node(1); n.next = Node(5); assert last(n) == 5; assert n.next.v == 5",
                    "n = Node(1, Node(2)); assert n.next is n.next"]),
    "in place": ("def sort_in_place(x): x.sort()\ndef zero(g):\n    for r in g: r[0] = 0\n    g.append([7])\n"
                 "def put(d, s): d['k'] = [1]; s.add(3)",
                 ["x = [2, 1]; sort_in_place(x); assert x == [1, 2]",
                  "g = [[1], [2]]; zero(g); assert g == [[0], [0], [7]]",
                  "d, s = {}, {1}; put(d, s); assert d == {'k': [1]} and s == {1, 3}"]),
    "generator": ("def f(n):\n    yield from range(n)", ["assert list(f(3)) == [0, 1, 2]", "assert 2 in f(5)"]),
    "recursion": ("def depth(n): return 0 if n == 0 else 1 + depth(n - 1)", ["assert depth(500) == 500"]),
    "unicode": ("def f(s): return s[::-1] + '\\ud800'", ["assert f('\u00e4\U0001f600') == '\U0001f600\u00e4\\ud800'"]),
    "float": ("def f(): return float('inf'), float('-inf'), 1e-300, float('nan')",
              ["a, b, c, d = f(); assert a == math.inf and b == -math.inf and c == 1e-300 and d != d"]),
    "values": ("def f(x): return x",
               [f"assert f({v}) == {v} and type(f({v})) is type({v})"
                for v in ("None", "True", "1", "10**5000", "-1", "b'\\x00'", "{1: {2}}", "frozenset([1])",
                          "set()", "2j",
                          "((1,), [])", "{(1, 2): [None]}", "'\\x00\\n'")]),
    "keywords": ("def f(operation, name=1, **others): return operation, name, others",
                 ["assert f(operation=2, name='n', function=3) == (2, 'n', {'function': 3})"]),
    "counter": ("from collections import Counter\ndef f(s): return Counter(s)",
               ["assert f('aab') == {'a': 2, 'b': 1}"]),
    "exception": ("def f(x):\n    if x < 0: raise ValueError('negative')\n    return {}[x]",
                  ["try:\n    f(-1)\nexcept ValueError as e:\n    assert str(e) == 'negative'\nelse:\n    assert False",
                   "try:\n    f(1)\nexcept KeyError:\n    pass"]),
    "dataclass": ("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\n"
                  "class P:\n    x: int",
                  ["assert P(3).x == 3", "assert str(P(3)) == 'P(x=3)'"]),
    "stdin": ("import sys\ndef main():\n    n = int(input())\n"
              "    print(sum(map(int, sys.stdin.read().split())), n)\n    \n"
              "if __name__ == '__main__':\n    main()\n    sys.exit(0)",
              [{"input": "2\n1 2\n", "output": "3 2"}, {"input": "1\n5", "output": "5 1\n"}]),
    "two lines": ("print('a ')\nprint('b')", [{"input": "", "output": "a\nb\n\n"}]),
    "open(0)": ("print(open(0).read().upper())", [{"input": "\u00e4b", "output": "\u00c4B"}]),
    "method": ("class Solution:\n    def twoSum(self, a, t): return [0, 1]",
               [{"fn_name": "twoSum", "input": "[1,2]\n3", "output": "[0,1]"}]),
    "function": ("def twoSum(a, t): return (0, 1)", [{"fn_name": "twoSum", "input": "[1,2]\n3", "output": "[0,1]"}]),
    "folder": ("def f():\n    open('a', 'w').write('x')\n    return open('a').read()", ["assert f() == 'x'"]),
    "imports": ("import math, re, heapq, bisect, random, datetime, decimal, fractions, statistics, typing, enum, time\n"
                "def f(): return str(decimal.Decimal('0.1')), datetime.datetime.strptime('2020', '%Y').year",
                ["assert f() == ('0.1', 2020)"]),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest(name):
    program, tests = HONEST[name]
    assert run_program(program, tests) == (len(tests), "")
    clean()


@pytest.mark.parametrize("program, test, feedback", [
    (ADD, "assert add(2, 2) == 5", "assert add(2, 2) == 5: got 4"),
    (ADD, "assert ad(1) == 2", "assert ad(1) == 2: NameError: name 'ad' is not defined"),
    ("def f(): return [1, 2]", "assert f() == (1, 2)", "assert f() == (1, 2): got [1, 2]"),
    ("def f(): return (1, 2)", "assert f() == [1, 2]", "assert f() == [1, 2]: got (1, 2)"),
    ("def f(): 1 / 0", "assert f() == 1", "assert f() == 1: ZeroDivisionError: division by zero"),
    ("def f(", "assert f() == 1", "SyntaxError"),
    ("def f(g): return g(1)", "assert f(lambda x: x) == 1", "can't pass a function to the solution"),
    ("print(input())", {"input": "a", "output": "b"}, "input 'a': expected 'b': got 'a\\n'"),
    ("print(int(input()))", {"input": "a", "output": "b"}, "ValueError: invalid literal"),
    ("def f(x): return x", {"fn_name": "f", "input": "1", "output": "2"}, "f input '1': expected '2': got 1"),
    ("while True: pass", "assert f() == 1", "time limit of 0.5 s exceeded"),
    (ADD, "syntax error here", "SyntaxError"),
])
def test_feedback(program, test, feedback):
    passed, text = run_program(program, [test], timeout=0.5)
    assert passed == 0 and feedback in text
    clean()


def test_tests_are_independent_and_feedback_short():
    program = "import os\ndef f(n):\n    if n == 1: os._exit(0)\n    return n"
    assert run_program(program, [f"assert f({n}) == {n}" for n in range(4)])[0] == 3
    passed, text = run_program("def f(x): return 'y' * 9999", [f"assert f('{'x' * 5000}') == {n}" for n in range(9)])
    assert passed == 0 and len(text) <= 2000 and text.count("\n") == 1


SNOOP = '''
import os
def look():
    found = []
    for place in %s:
        try: found.append(open(place, 'rb').read(10))
        except OSError: pass
    return found
'''
HOSTILE = {  # program, test; none may pass
    "loop at import": ("while True: pass", "assert f() == 1"),
    "loop in function": ("def f():\n while True: pass", "assert f() == 1"),
    "loop without signals": ("import signal\nfor n in range(1, 32):\n try: signal.signal(n, signal.SIG_IGN)\n"
                             " except Exception: pass\nwhile True: pass", "assert f() == 1"),
    "sleep": ("import time\ntime.sleep(60)", "assert f() == 1"),
    "fork bomb": ("import os\nwhile True:\n try: os.fork()\n except Exception: pass", "assert f() == 1"),
    "fork": ("import os\ndef f():\n try: os.fork()\n except OSError: return 'no'\n return 1", "assert f() == 1"),
    "grandchild": ("import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  time.sleep(99)\n"
                   "def f(): return 1", "assert f() == 1"),
    "subprocess": ("import subprocess\nsubprocess.Popen(['/bin/sleep', '99'], start_new_session=True)\n"
                   "def f(): return 1",
                   "assert f() == 1"),
    "exec": ("import os\nos.execv('/bin/sh', ['sh', '-c', 'sleep 99'])", "assert f() == 1"),
    "threads": ("import threading, time\ndef w():\n while True: time.sleep(1)\n"
                "for _ in range(99): threading.Thread(target=w).start()\ndef f(): return 1", "assert f() == 1"),
    "memory": ("x = []\nwhile True: x.append(bytearray(10**7))", "assert x == 1"),
    "large int": ("def f(): return 9**9**9", "assert f() == 1"),
    "output": ("import os\nwhile True: os.write(1, b'x' * 65536)", {"input": "", "output": "x"}),
    "large answer": ("def f(): return 'x' * 10**8", "assert f() == 'x'"),
    "exit": ("import os\nos._exit(0)", "assert True and f() == 1"),
    "exit stdin": ("import os\nos._exit(0)", {"input": "", "output": "1"}),
    "sys.exit": ("import sys\nsys.exit(0)", "assert f() == 1"),
    "sys.exit in function": ("import sys\ndef f(): sys.exit(0)", "assert f() == 1"),
    "exit in function": ("import os\ndef f(): os._exit(0)", "assert f() == 1"),
    "exit before except": ("import os\ndef f(): os._exit(0)", "try:\n f()\nexcept Exception:\n pass"),
    "exit before bare except": ("import os\ndef f(): os._exit(0)", "try:\n f()\nexcept:\n pass"),
    "GeneratorExit": ("def f(): raise GeneratorExit", "assert f() == 1"),
    "success word": ("print('PASSED 3 of 3', '{\"passed\": 3}', flush=True)\ndef f(): return 'PASSED'",
               "assert f() == 1"),
    "equal": ("class E:\n __eq__ = lambda s, o: True\n __ne__ = lambda s, o: False\n __hash__ = lambda s: hash(1)\n"
              " __bool__ = lambda s: True\n __sub__ = __rsub__ = __abs__ = lambda s, *o: s\n"
              " __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda s, o: True\ndef f(): return E()",
              "assert f() == 1"),
    "equal, in a list": ("class E:\n __eq__ = lambda s, o: True\ndef f(): return [E()]", "assert f() == [1]"),
    "int subclass": ("class I(int):\n __eq__ = lambda s, o: True\n __hash__ = int.__hash__\ndef f(): return I(5)",
                     "assert f() == 1"),
    "close": ("class E:\n __sub__ = __rsub__ = __abs__ = lambda s, *o: 0.0\n __lt__ = lambda s, o: True\n"
              " __float__ = lambda s: 0.0\ndef f(): return E()", "assert abs(f() - 1) < 0.1"),
    "unequal": ("class E:\n __ne__ = lambda s, o: False\ndef f(): return E()", "assert not f() != 1"),
    "names of builtins": ("len = abs = sorted = all = isinstance = lambda *a: 1\nclass math:\n"
                          " isclose = lambda *a: True\n"
                          "def f(): return 0", "assert len([f()]) == 1 and abs(f()) == 1 or math.isclose(f(), 1)"),
    "builtins": ("import builtins\nbuiltins.len = builtins.abs = lambda x: 1\nbuiltins.AssertionError = Exception\n"
                 "builtins.compile = builtins.exec = builtins.repr = builtins.ascii = lambda *a: '1'\n"
                 "def f(): return []",
                 "assert len(f()) == 1"),
    "patched modules": ("import json, ast, sys, os, operator\njson.loads = json.dumps = lambda *a, **k: 1\n"
                        "ast.literal_eval = ast.parse = lambda *a: ('call', 1)\noperator.eq = lambda *a: True\n"
                        "sys.modules.clear()\ndef f(): return 0", "assert f() == 1"),
    "json": ("import json\nclass D(dict):\n def __getitem__(s, k): return 1\n __missing__ = get = __getitem__\n"
             "json.loads = lambda *a, **k: D(passed=9, feedback='')\njson.dumps = lambda *a, **k: '{\"passed\": 9, \"feedback\": \"\"}'\n"
             "json.JSONDecoder.decode = json.JSONEncoder.encode = json.decoder.JSONDecoder.raw_decode = lambda *a: '\"\"'\n"
             "def f(): return 0", {"fn_name": "f", "input": "", "output": "1"}),
    "frames": ("import sys, gc\nframe = sys._getframe()\nwhile frame:\n for n in list(frame.f_locals):\n"
               "  if n in ('tests', 'text', 'texts', 'passed', 'request'): frame.f_locals[n] = ''\n"
               " frame = frame.f_back\nfor o in gc.get_objects():\n"
               " if type(o) is dict and 'passed' in o: o['passed'] = 1\n"
               "def f(): return 0", "assert f() == 1"),
    "look for the tests": ("import gc, sys\ndef f():\n frame, seen = sys._getframe(), []\n while frame:\n"
                           "  seen.append(repr(list(frame.f_locals.values())))\n  frame = frame.f_back\n"
                           " seen += [repr(o)[:9999] for o in gc.get_objects() if type(o) in (dict, list, tuple)]\n"
                           " needle = ''.join(reversed('1234'))\n"
                           " return needle if any(needle in s for s in seen) else 0", "assert f() == '4321'"),
    "every fd": ("import os\nfor fd in range(256):\n try: os.write(fd, b'\"\"\\n' * 9)\n except OSError: pass\n"
                 "def f(): return 0", "assert f() == 1"),
    "replies ahead": ("import os\nfor _ in range(99): os.write(3, b\"('ok', None, None)\\n\")\ndef f(): return 0",
                      "assert f() == 1"),
    "deep reply": ("import os\nos.write(3, b'(' * 500000 + b'\\n')\ndef f(): return 0", "assert f() == 1"),
    "long sum reply": ("import os\nos.write(3, b'-' * 500000 + b'1\\n')\ndef f(): return 0", "assert f() == 1"),
    "close fds": ("import os\nos.closerange(0, 256)\ndef f(): return 1", "assert f() == 1"),
    "recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()", "assert f() == 1"),
    "deep value": ("def f():\n x = []\n for _ in range(10**5): x = [x]\n return x", "assert f() == 1"),
    "cycle": ("def f():\n x = []\n x.append(x)\n return x", "assert f() == 1"),
    "abort": ("import os\nos.abort()", "assert f() == 1"),
    "core dump": ("import ctypes, os, resource\ntry: resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2)\n"
                  "except Exception: pass\nctypes.string_at(0)", "assert f() == 1"),
    "segfault": ("import ctypes\nctypes.string_at(0)", "assert f() == 1"),
    "surrogates": ("x = '\ud800'\ndef f(): return 1", "assert f() == 1"),
    "unicode": ("def f(): return '\u202e1\u2028\\ud83d\\x00\uff11', chr(0x10ffff) * 99\nf.__name__ = '\uff46'\n\u0435q = f",
                "assert f() == 1"),
    "null byte": ("x = 1\0\ndef f(): return 1", "assert f() == 1"),
    "raises in __del__": ("class D:\n def __del__(self): raise SystemExit(0)\nd = D()\ndel d\n"
                          "def f(): return D() and 0",
                          "assert f() == 1"),
    "endless __del__": ("class D:\n def __del__(self):\n  while True: pass\ndef f(): D()", "assert f() == 1"),
    "endless repr": ("class D:\n def __repr__(self):\n  while True: pass\ndef f(): return D()", "assert f() == 1"),
    "endless iterator": ("import itertools\ndef f(): return itertools.count()", "assert list(f()) == 1"),
    "endless exception": ("class E(Exception):\n def __str__(self):\n  while True: pass\ndef f(): raise E",
               "assert f() == 1"),
    "many files": ("i = 0\nwhile True:\n open(f'f{i}', 'w').write('x' * 9999)\n i += 1", "assert f() == 1"),
    "folder": ("import os, shutil\nopen('x', 'w').close()\nos.makedirs('a/b')\nos.chmod('a', 0)\nos.chmod('.', 0)\n"
               "def f(): return 1", "assert f() == 1"),
    "no folder": ("import os\ntry: os.rmdir(os.getcwd())\nexcept OSError: pass\ndef f(): return 0", "assert f() == 1"),
    "kill the parent": ("import os, signal\ndef f():\n done = 0\n for p in (os.getppid(), %d, 1, -1, 0):\n"
                        "  try: os.kill(p, 9); done = 1\n  except OSError: pass\n return done" % os.getpid(),
                        "assert f() == 1"),
    "prlimit": ("import os, resource\ndef f():\n for p in (os.getppid(), %d):\n"
                "  try: resource.prlimit(p, resource.RLIMIT_CPU, (0, 0)); return 1\n"
                "  except OSError: pass" % os.getpid(),
                "assert f() == 1"),
    "network": ("import socket\ndef f():\n for kind in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):\n"
                "  try: socket.socket(kind); return 1\n  except OSError: pass\n return 0", "assert f() == 1"),
    "parent's environment": (SNOOP % "[f'/proc/{p}/{n}' for p in (os.getppid(), 'self', 1) "
                             "for n in ('environ', 'mem')]",
                             "assert look() != []"),
    "files": (SNOOP % "['/etc/passwd', '/etc/hostname', __import__('ast').__file__, '../../etc/passwd']",
              "assert look() != []"),
    "own environment": ("import os\ndef f(): return dict(os.environ)", "assert f() != {} and 'LC_CTYPE' not in f()"),
    "write outside": ("import os\ndef f():\n for p in ('/tmp/sandbox-was-here', '/dev/shm/sandbox-was-here', "
                      "'/var/tmp/sandbox-was-here'):\n  try: open(p, 'w'); return 1\n  except OSError: pass\n"
                      " try: open('../was-here', 'w')\n except OSError: pass", "assert f() == 1"),
}


def contain(name):
    """Run a hostile program. AssertionError if it scores, outlives its limit by a second, or leaves anything."""
    program, test = HOSTILE[name]
    run_program(ADD, TESTS)
    judge, before, start = CODE.process.pid, traces(), time.monotonic()
    passed, text = run_program(program, [test], timeout=0.5)
    assert passed == 0 and text and time.monotonic() - start < 1.5, (name, passed, text)
    assert "Error: invalid syntax" not in text and "IndentationError" not in text, text  # it is the intended program
    assert traces() <= before and not glob.glob(FOLDERS.format(judge))     # clean() looks at the next judge's, if this one died
    clean()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name):
    contain(name)


def test_endless_three_times():
    for _ in range(3):
        start = time.monotonic()
        assert run_program("while True: pass", ["assert f() == 1"] * 9)[0] == 0
        assert time.monotonic() - start < 2
        clean()


def test_loopback_stays_closed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        program = f"import socket\ndef f(): return bool(socket.create_connection({address}))"
        assert run_program(program, ["assert f() == True"])[0] == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can read another process's memory")
def test_no_test_reaches_the_solution():
    """The process that the solutions are forked from has none of a request's text in its memory; the judge has."""
    secret = "secret-" * 5
    run_program(ADD, [f"assert add('', '') == '{secret}'"] * 3)
    judge = str(CODE.process.pid)
    forker = [row[0] for row in processes() if row[1] == judge]
    assert len(forker) == 1

    def holds(pid):
        found = False
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
            for line in maps:
                (low, high), rights = (int(x, 16) for x in line.split()[0].split("-")), line.split()[1]
                if rights.startswith("rw"):
                    memory.seek(low)
                    found = found or secret.encode() in memory.read(high - low)
        return found
    assert holds(judge) and not holds(forker[0])


def test_threads_and_fork():
    results = []
    threads = [threading.Thread(target=lambda: results.append(run_program(ADD, TESTS))) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert results == [(3, "")] * 4


def echo_server():
    import json, sys, time
    print("{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("die"):
            sys.exit(1)
        time.sleep(request.get("sleep", 0))
        print(json.dumps({"text": request.get("text", "x" * request.get("size", 0))}), flush=True)


def test_a_builtins_name_is_no_way_to_pass():
    """In a test `sum` is Python's own, so it says nothing of the program, right or wrong."""
    for program in ("def sum(x): return 0", "def other(): pass"):
        passed, feedback = run_program(program, ["assert sum([1, 2]) == 3"])
        assert passed == 0 and "uses nothing that the program defines" in feedback


def test_child():
    child = Child(echo_server)
    assert child.ask({"text": "a\u00e4\n" * 99999}, 5)["text"] == "a\u00e4\n" * 99999
    assert child.ask({"die": True}, 5) is None
    start = time.monotonic()
    assert child.ask({"sleep": 60}, 0.5) is None and time.monotonic() - start < 1.5
    assert child.ask({"size": 2 << 20}, 5) is None
    assert child.ask({"text": "b"}, 5) == {"text": "b"}
    child.stop()
    clean()


def test_nothing_left_at_exit():
    code = "from eval import CODE, run_program; print(run_program('x = 1', ['assert x == 1'])); print(CODE.process.pid)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    result, pid = done.stdout.splitlines()
    assert result == "(1, '')" and not [row for row in processes() if row[0] == pid or row[1] == pid]


def test_everything_dies_with_the_server():
    run_program(ADD, TESTS)
    before, pid = {row[0] for row in descendants()}, CODE.process.pid
    threading.Timer(0.5, lambda: os.kill(CODE.process.pid, 9)).start()
    assert run_program("while True: pass", ["assert f() == 1"], timeout=2) == (0, "the sandbox failed")
    time.sleep(0.3)
    assert not {row[0] for row in processes() if row[0] in before and "Z" not in row[2]}
    [os.rmdir(folder) for folder in glob.glob(FOLDERS.format(pid))]
    clean()


def main(argv=None):
    parser = argparse.ArgumentParser(description="Run every hostile program some times, then measure honest ones.")
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args(argv).rounds
    for n in range(1, rounds + 1):
        for name in HOSTILE:
            contain(name)
        print(f"contained {n * len(HOSTILE)} runs of {len(HOSTILE)} hostile programs", flush=True)
    start, count = time.monotonic(), 500
    for n in range(count):
        assert run_program(f"def add(a, b):\n    return a + b + {n} - {n}\n", TESTS) == (3, "")
    print(f"verified {count / (time.monotonic() - start):.0f} tiny programs a second, three tests each")


if __name__ == "__main__":
    main()
