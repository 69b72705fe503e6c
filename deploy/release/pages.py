#!/usr/bin/env python3
"""Asks the programs for their completions of three shells, and writes a man page of each from its `--help`."""

import pathlib
import re
import subprocess
import sys
import time

import shared

# Names that each shell looks for.
COMPLETIONS = {"bash": "{}.bash", "zsh": "_{}", "fish": "{}.fish"}
# Deeper than that, a line of `--help` belongs to the option above it.
OPTION_COLUMNS_MAX = 6


def said(program, *words):
    """What a program prints. Without an environment, since `--help` shows what variables are set to."""
    command = [str(program), *words]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"})
    return output.stdout


def escaped(text):
    """Text as roff prints it as it is."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


class Page:
    """A man page that is being written, line by line of a `--help`."""

    def __init__(self):
        self.lines = []
        self.is_verbatim = False
        self.is_option = False

    def verbatim(self, on):
        """Begins or ends a part whose lines stay as they are."""
        if on != self.is_verbatim:
            self.lines.append(".nf" if on else ".fi")
        self.is_verbatim = on

    def blank(self):
        """A blank line: between paragraphs, and within an option's text."""
        if self.is_verbatim:
            self.lines.append("")
        elif self.lines and not self.lines[-1].startswith((".SH", ".PP", ".sp")):
            self.lines.append(".sp" if self.is_option else ".PP")

    def take(self, line):
        """The next line."""
        text = line.strip()
        columns = len(line) - len(line.lstrip())
        if not text:
            self.blank()
        elif columns == 0 and text.endswith(":") and re.fullmatch(r"[A-Z][\w ]+:", text):
            self.verbatim(False)
            self.is_option = False
            if self.lines[-1] in (".PP", ".sp"):
                self.lines.pop()
            self.lines.append(f".SH {escaped(text[:-1].upper())}")
        elif columns == 0:
            self.verbatim(False)
            self.is_option = False
            self.lines.append(escaped(text))
        elif columns <= OPTION_COLUMNS_MAX and text.startswith("-"):
            self.verbatim(False)
            self.is_option = True
            self.lines += [".TP", f"\\fB{escaped(text)}\\fR"]
        elif self.is_option and columns > OPTION_COLUMNS_MAX:
            if text.startswith(("- ", "[")):
                self.lines.append(".br")
            self.lines.append(escaped(text))
        else:
            self.verbatim(True)
            self.is_option = False
            self.lines.append(escaped(line))


def man_page(program, version, epoch, told):
    """The man page of a program whose `--help` is `told`."""
    summary, _, rest = told.strip().partition("\n")
    day = time.strftime("%Y-%m-%d", time.gmtime(epoch))
    page = Page()
    page.lines = [f'.TH {program.upper()} 1 "{day}" "{program} {version.plain}" "User Commands"', ".SH NAME",
                  f"{program} \\- {escaped(summary.rstrip('.'))}"]
    before, _, after = rest.partition("Usage:")
    usage, _, after = after.partition("\n\n")
    page.lines += [".SH SYNOPSIS", ".nf", *(escaped(line.strip()) for line in usage.strip().splitlines()), ".fi", ".SH DESCRIPTION"]
    for line in (before.strip() or summary).splitlines():
        page.take(line)
    page.blank()
    for line in after.splitlines():
        page.take(line)
    page.verbatim(False)
    return "\n".join(page.lines) + "\n"


def main():
    args = shared.arguments(__doc__.split("\n")[0]).parse_args()
    for folder in ("completions", "man"):
        (args.out / folder).mkdir(parents=True, exist_ok=True)
    for program in shared.PROGRAMS:
        path = args.stage / "bin" / program
        for shell, name in COMPLETIONS.items():
            (args.out / "completions" / name.format(program)).write_text(said(path, "completions", shell), encoding="utf-8")
        text = man_page(program, args.version, args.epoch, said(path, "--help"))
        (args.out / "man" / f"{program}.1").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(error.cmd[:2])}: {error.stderr.strip() or error}")
    except OSError as error:
        sys.exit(str(error))
