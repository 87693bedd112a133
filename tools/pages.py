"""Make the pages of the documentation site: pages.py INTO.

README is the first page, and docs/ as it is. Two references are written from what they describe: the contract's from
the protos' comments, the commands' from the command line's own declarations.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

from decideonce_server.cli import cli

ROOT = Path(__file__).parents[1]

# Numbers of the fields that lead to an element's comment (google/protobuf/descriptor.proto).
MESSAGE, ENUM, SERVICE = 4, 5, 6
PART = 2  # a message's field, an enum's value, a service's method

# A link to a file or a folder.
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(#[^)]*)?\)")
# A comment before a piece of code says how it is tested, and is nothing for readers.
TEST_MARK = re.compile(r"^<!-- [^\n]* -->\n(?=```)", re.MULTILINE)


def write_pages(into: Path) -> None:
    """Write every page below a directory, which is emptied before."""
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(ROOT / "docs", into, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", into / "index.md")
    for page in into.rglob("*.md"):
        source = ROOT / "README.md" if page.name == "index.md" else ROOT / "docs" / page.relative_to(into)
        text = TEST_MARK.sub("", page.read_text())
        page.write_text(LINK.sub(lambda link, at=page, of=source: _moved_link(link, of, at, into), text))
    (into / "reference").mkdir()
    (into / "reference/protos.md").write_text("\n".join(contract_page()))
    (into / "reference/commands.md").write_text("\n".join(commands_page()))


def _moved_link(link: re.Match[str], source: Path, page: Path, into: Path) -> str:
    """Write a link of a repository's page as the site has it, which gets the files that are linked to."""
    text, target, anchor = link.groups()
    path = (source.parent / target).resolve()
    if path.is_dir():
        return text
    if path.is_relative_to(ROOT / "docs"):
        moved = into / path.relative_to(ROOT / "docs")
    else:
        moved = into / "repository" / path.relative_to(ROOT)
        moved.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, moved)
    return f"[{text}]({os.path.relpath(moved, page.parent)}{anchor or ''})"


def contract_page() -> Iterator[str]:
    """Give the lines of the page about the protos."""
    built = subprocess.run(  # noqa: S603  # our own tool
        [ROOT / ".venv/bin/buf", "build", ROOT, "-o", "-"], capture_output=True, check=True
    )
    yield "# The protos\n"
    yield "`protos/decideonce/v1/`, element by element. [The contract](../contract.md) tells what is answered when.\n"
    # A buf image is a FileDescriptorSet.
    for file in descriptor_pb2.FileDescriptorSet.FromString(built.stdout).file:
        if file.package == "decideonce.v1":
            yield from _file_lines(file)


def _file_lines(file: descriptor_pb2.FileDescriptorProto) -> Iterator[str]:
    comments = {tuple(at.path): at.leading_comments for at in file.source_code_info.location}
    yield f"## {Path(file.name).name}\n"
    for i, service in enumerate(file.service):
        yield from _head(service.name, comments[SERVICE, i])
        yield "| rpc | takes, gives | |\n|---|---|---|"
        for j, method in enumerate(service.method):
            types = f"{_type_link(method.input_type)}, {_type_link(method.output_type)}"
            yield f"| `{method.name}` | {types} | {_cell(comments[SERVICE, i, PART, j])} |"
        yield ""
    for i, message in enumerate(file.message_type):
        yield from _head(message.name, comments[MESSAGE, i])
        if message.field:
            yield "| field | | type | |\n|---|---|---|---|"
        for j, field in enumerate(message.field):
            text = _cell(comments[MESSAGE, i, PART, j])
            yield f"| `{field.name}` | {field.number} | {_field_type(message, field)} | {text} |"
        yield ""
    for i, enum in enumerate(file.enum_type):
        yield from _head(enum.name, comments[ENUM, i])
        yield "| value | | |\n|---|---|---|"
        for j, value in enumerate(enum.value):
            yield f"| `{value.name}` | {value.number} | {_cell(comments[ENUM, i, PART, j])} |"
        yield ""


def _head(name: str, comment: str) -> Iterator[str]:
    yield f"### {name} {{ #{name} }}\n"
    yield from _paragraphs(comment)


def _paragraphs(text: str) -> Iterator[str]:
    yield from (f"{_cell(paragraph)}\n" for paragraph in re.split(r"\n\s*\n", text.strip()))


def _cell(comment: str) -> str:
    """Write a comment in one line, so that Markdown takes nothing in it for its own, code quotes apart."""
    return re.sub(r"([|<*_\[\]])(?=[^`]*(?:`[^`]*`[^`]*)*$)", r"\\\1", " ".join(comment.split()))


def _field_type(message: descriptor_pb2.DescriptorProto, field: Field) -> str:
    text = _type_link(field.type_name) if field.type_name else f"{Field.Type.Name(field.type)[5:].lower()}"
    if field.label == Field.LABEL_REPEATED:
        return f"repeated {text}"
    if field.proto3_optional:
        return f"optional {text}"
    if field.HasField("oneof_index"):
        return f"{text}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return text


def _type_link(full_name: str) -> str:
    name = full_name.removeprefix(".decideonce.v1.")
    return f"`{full_name[1:]}`" if "." in name else f"[{name}](#{name})"


def commands_page() -> Iterator[str]:
    """Give the lines of the page about commands and settings."""
    yield "# Commands and settings\n"
    yield (
        "Every setting of what runs is a flag and a variable; a flag that is given wins. Exit codes: 0 done, 1 failed, "
        "2 not understood. [The command line](../command-line.md) shows commands at work.\n"
    )
    yield from _command_lines(cli, click.Context(cli, info_name="decideonce"))


def _command_lines(command: click.Command, context: click.Context) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.commands[name]
            if not child.hidden:
                yield from _command_lines(child, click.Context(child, info_name=name, parent=context))
        return
    yield f"## {context.command_path}\n"
    yield f"`{' '.join([context.command_path, *command.collect_usage_pieces(context)])}`\n"
    yield from _paragraphs(command.help or "")
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    if options:
        yield "| flag | variable | default | |\n|---|---|---|---|"
    yield from (_option_row(option, context) for option in options)
    yield ""


def _option_row(option: click.Option, context: click.Context) -> str:
    extra = option.get_help_extra(context)
    flags = " / ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
    value = "" if option.is_flag else f" {_cell(option.make_metavar(context))}"
    if "range" in extra:
        value = f" `{extra['range']}`"
    variables = " ".join(f"`{variable}`" for variable in extra.get("envvars", ()))
    default = f"`{extra['default']}`" if "default" in extra else extra.get("required", "")
    return f"| {flags}{value} | {variables} | {default} | {_cell(option.help or '')} |"


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
