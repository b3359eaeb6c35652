"""Scripts of our pages outside of them: run by node, or else by a headless Chromium."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

NODE = shutil.which("node")
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)


def evaluate(script, expression, folder):
    """Value of an expression that ends a script."""
    code = f"{script}\nconst result = JSON.stringify({expression});\n"
    if NODE:
        file = Path(folder) / "script.js"
        file.write_text(f"{code}console.log(result);\n")
        return json.loads(subprocess.check_output([NODE, str(file)], text=True, timeout=60))
    page = Path(folder) / "script.html"
    page.write_text(f"<pre id=out></pre><script>{code}out.textContent = result;</script>")
    return json.loads(html.unescape(re.search("<pre id=.out.>(.*?)</pre>", dom(page))[1]))


def dom(page):
    """The page's document after its scripts have run."""
    profile = page.with_suffix(".profile")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1300,900"]
    command = [CHROMIUM, "--headless=new", *flags, f"--user-data-dir={profile}", "--dump-dom"]
    try:
        return subprocess.run(
            [*command, page.as_uri()],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=60,
            check=True,
        ).stdout
    except subprocess.TimeoutExpired as late:
        written = (late.stdout or b"").decode()
        if written.rstrip().endswith("</html>"):  # now and then it prints all, and does not end
            return written
        raise
