import subprocess


def subprocess_run(code, cmd_list, sandbox_type, stdin=None, timeout=10):
    return True, f"GEM's own, {sandbox_type}", ""


def run_python(code, sandbox_type, stdin=None, timeout=10):
    try:
        return subprocess_run(code, [], sandbox_type, stdin)
    except subprocess.TimeoutExpired:
        return False, "", f"Execution timed out after {timeout} seconds."
