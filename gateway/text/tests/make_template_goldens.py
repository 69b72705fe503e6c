"""Writes data/templates.jsonl: what transformers renders for templates written here, one construct each, to compare
`chat_template.rs` with. Run with transformers 5.23 and jinja2 3.1.6 after changing a case:

    python make_template_goldens.py

Each line: {"name", "template", "error" (true) or "text", and what differs from the defaults of CONVERSATION}."""

import datetime
import json
import pathlib

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

NOW = 1_767_323_045  # 2026-01-02 03:04:05 UTC
HERE = pathlib.Path(__file__).parent

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "It's <hot> & \"cold\" — in Łódź 東京",
        "parameters": {
            "type": "object",
            "properties": {
                "zone": {"type": "string", "enum": ["b", "a"]},
                "items": {"type": "array", "items": {"type": "integer"}},
                "a": {"type": "number", "minimum": 1.0, "maximum": 1e-05, "default": None},
            },
            "required": ["zone"],
        },
    },
}
CALL = {
    "role": "assistant",
    "reasoning_content": "Hm…\nso.",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"zone": "a", "n": 2.0, "ok": True}}}
    ],
}
CONVERSATION = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  Grüße, 👩‍👩‍👧 'x' \"y\" \u00a0\u2028 <b>&amp;\t\r\n"},
        CALL,
        {"role": "tool", "tool_call_id": "c1", "content": '{"t": 1}'},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": None},
    ],
    "tools": [TOOL],
    "documents": [{"title": "T", "text": "body"}],
    "add_generation_prompt": True,
    "continue_final_message": False,
    "variables": {
        "enable_thinking": False,
        "n": 7,
        "f": 2.5,
        "s": "Hello World",
        "d": {"b": 1, "a": [1, "x", None, True, 1.5], "C": {"k": "it's"}},
        "l": [3, 1, 2],
        "words": ["pear", "Apple", "fig", "apple"],
        "rows": [{"k": "x", "v": 1}, {"k": "y", "v": 2}, {"k": "X", "v": 3}],
        "floats": [0.1, 1.0, 100.0, 1e15, 1e16, 1.5e300, 1e-4, 1e-5, 123456789.123, -0.0],
        "odd": "a\\b\n\t\x07é\u0301\u200d\U0001f600\u2028'",
        "ws": " \t a  b \n c \x1f\u00a0",
    },
}

CASES = {
    # Whitespace and tags
    "trim blocks": "a\n{% if true %}\nb\n{% endif %}\nc\n",
    "lstrip blocks": "a\n   {% if true %}x{% endif %}\n\t{# note #}\n  {{ 1 }}\n",
    "minus": "a  \n {%- if true -%} \n b \n {%- endif -%} \n c {{- 1 -}} \n d {#- x -#} \n e",
    "plus": "a\n  {%+ if true +%}\nb\n  {%+ endif %}\n {# c +#}\nd",
    "text before a block": "x {% if true %} y {% endif %} z",
    "carriage returns": "a\r\n{% if true %}\r\nb\r{% endif %}\r\n",
    "newlines at the end": "a\n\n",
    "raw": "{% raw %}{{ x }} {% if %}{% endraw %}|{%- raw -%} a {%- endraw -%} b",
    "comment over lines": "a{# {{ x }}\n{% if %} #}b",
    "generation": "x\n{% generation %}\n{{ n }}{% set n = 8 %}\n{% endgeneration %}\n{{ n }}",
    "print tag": "{% print n %}",
    "block tag": "{% block x %}{{ n }}{% endblock %}",
    "broken": "{% if %}",
    "no end": "{% for x in l %}",
    "unknown tag": "{% frobnicate %}",
    "stray brace": "{{ [1, 2) }}",
    # Literals and printing
    "constants": "{{ true }} {{ False }} {{ none }} {{ None }} {{ 1_000 }} {{ 0x1f }} {{ 1.50 }} {{ 1e3 }} {{ 2E-7 }}",
    "strings": r"""{{ 'a\n\t\'b\\' ~ "c\"é\u00e9\x41\101" 'joined' }}""",
    "floats": "{% for f in floats %}{{ f }} {% endfor %}{{ floats }} {{ 1/3 }} {{ 7 // 2 }} {{ 7.0 // 2 }} {{ 2 ** 3 }}",
    "list": "{{ l }} {{ [] }} {{ ['a', \"it's\", none, true, 1.0] }} {{ (1,) }} {{ () }} {{ (1, 2) }}",
    "dict": "{{ d }} {{ {} }} {{ {'b': 1, 2: 'x', none: true} }}",
    "repr": "{{ [odd] }} {{ ['\"'] }} {{ [\"'\", '\\'\"'] }}",
    "message": "{{ messages[0] }} {{ messages[2] }} {{ messages[4] }}",
    "views": "{{ d.items() }} {{ d.keys() }} {{ d.values() }} {{ range(3) }} {{ range(1, 9, 2) }}",
    "undefined": "[{{ nope }}] [{{ d.nope }}] [{{ nope ~ 'x' }}] {{ nope is defined }} {{ nope == none }} {{ not nope }}",
    "undefined attribute": "{{ nope.x }}",
    "undefined sum": "{{ nope + 'x' }}",
    "undefined loop": "{% for x in nope %}x{% else %}none{% endfor %} {{ nope | length }} {{ 'a' in nope }}",
    "undefined order": "{{ nope < 1 }}",
    "attribute of none": "[{{ none.x }}] [{{ none[0] }}]",
    # Operators
    "arithmetic": "{{ 1 + 2 * 3 - 4 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 7.5 % 2 }} {{ 2 ** -1 }} {{ -2 ** 2 }} {{ 1 + true }} {{ +1 }}",
    "precedence": "{{ 1 + 2 ~ 3 }} {{ 'a' ~ 1 + 2 }} {{ not true and false }} {{ 1 if false else 2 if false else 3 }}",
    "strings with operators": "{{ 'a' + 'b' }} {{ 'ab' * 2 }} {{ 2 * 'ab' }} {{ 'a' ~ 1 ~ none ~ 1.0 ~ [1] }}",
    "lists with operators": "{{ [1] + [2] }} {{ [1] * 2 }} {{ (1,) + (2,) }}",
    "string and number": "{{ 'a' + 1 }}",
    "division by zero": "{{ 1 / 0 }}",
    "comparisons": "{{ 1 < 2 < 3 }} {{ 1 == 1.0 }} {{ true == 1 }} {{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }} {{ 1 != 2 }} {{ none == false }}",
    "order of kinds": "{{ 1 < 'a' }}",
    "in": "{{ 'b' in d }} {{ 'ell' in s }} {{ 3 in l }} {{ 9 not in l }} {{ 1 in {1: 2} }} {{ 'x' in ['x'] }} {{ 2 in range(3) }}",
    "number in string": "{{ 1 in s }}",
    "and or": "{{ '' or 'x' }} {{ 0 and 1 }} {{ l and 'y' }} {{ none or 0 or [] }} {{ 1 and 2 or 3 }}",
    "inline if": "[{{ 'a' if false }}] [{{ 'a' if true else 'b' }}]",
    "truth": "{% for x in [0, 1, '', 'a', [], [0], {}, none, 0.0, 0.1] %}{{ 'T' if x else 'F' }}{% endfor %}",
    "percent": "{{ '%s is %d, %5.2f|%-4s|%04d|%x|%+d|%%' % ('a', 3, 2.345, 'b', 42, 255, 7) }} {{ '%s' % 'one' }} {{ '%s' % [1] }} {{ '%(a)s' % {'a': 1} }} {{ '%r' % 'q' }} {{ '%.3e %g %g' % (12345.678, 0.00001, 100000) }}",
    "percent lacks": "{{ '%s %s' % ('a',) }}",
    "percent too many": "{{ '%s' % ('a', 'b') }}",
    # Subscripts
    "indexes": "{{ l[0] }} {{ l[-1] }} [{{ l[9] }}] {{ s[0] }} {{ s[-1] }} [{{ s[99] }}] {{ d['b'] }} {{ d.a[1] }} {{ l.0 }} {{ (1, 2)[1] }}",
    "slices": "{{ l[1:] }} {{ l[:-1] }} {{ l[::-1] }} {{ s[1:4] }} {{ s[::-1] }} {{ s[-3:] }} {{ s[:99] }} {{ l[5:] }} {{ s[::2] }} {{ s[8:2:-2] }} {{ l[none:2] }} {{ range(9)[2:4] | list }}",
    "messages backwards": "{% for m in messages[::-1] %}{{ m.role }} {% endfor %}{{ messages[1:][0].role }} {{ messages[-1]['role'] }}",
    "methods before keys": "{% set x = {'items': 1, 'other': 2} %}{{ x['items'] }} {{ x.other }} {% for k, v in x.items() %}{{ k }}={{ v }};{% endfor %}",
    "keys of schemas": "{% for k, v in tools[0].function.parameters.properties.items() %}{% if 'items' in v %}{{ k }}: {{ v['items'] }};{% endif %}{% endfor %}",
    "get": "{{ d.get('b') }} {{ d.get('nope') }} {{ d.get('nope', 'x') }} {{ messages[0].get('content') }}",
    "forbidden": "{{ l.append(1) }}",
    "forbidden pop": "{{ messages.pop(0) }}",
    "forbidden update": "{{ d.update({'x': 1}) }}",
    "dunder": "{{ ''.__class__.__mro__ }}",
    # Statements
    "if": "{% if n > 9 %}a{% elif n > 6 %}b{% else %}c{% endif %}{% if none %}x{% endif %}",
    "loop": "{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }} {% endfor %}",
    "neighbours": "{% for x in l %}[{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }}]{% endfor %}{% for x in l %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{% endfor %}",
    "filtered loop": "{% for x in l if x > 1 %}{{ loop.index }}/{{ loop.length }}:{{ x }}{{ loop.last }} {% else %}none{% endfor %}",
    "filtered loop sees changes": "{% set ns = namespace(stop=false) %}{% for x in l if not ns.stop %}{{ x }}{% set ns.stop = true %}{% endfor %}",
    "loop else": "{% for x in [] %}x{% else %}empty{% endfor %}{% for x in [1] if x > 1 %}x{% else %}none{% endfor %}",
    "unpacking": "{% for a, b in [(1, 2), [3, 4]] %}{{ a }}{{ b }} {% endfor %}{% for k, v in d | items %}{{ k }}={{ v }} {% endfor %}{% for (a, (b, c)) in [(1, (2, 3))] %}{{ a + b + c }}{% endfor %}",
    "unpacking wrong": "{% for a, b in [(1, 2, 3)] %}{{ a }}{% endfor %}",
    "loop over a dict": "{% for k in d %}{{ k }}{% endfor %}",
    "loop over a string": "{% for c in 'aé😀' %}[{{ c }}]{% endfor %}",
    "loop over none": "{% for x in none %}{% endfor %}",
    "loop over a number": "{% for x in 3 %}{% endfor %}",
    "break and continue": "{% for x in range(9) %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 5 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "recursive loop": "{% for x in [[1, [2]], [3]] recursive %}({{ loop.depth }}{% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}{% endif %}){% endfor %}",
    "cycle and changed": "{% for x in [1, 1, 2] %}{{ loop.cycle('a', 'b') }}{{ loop.changed(x) }} {% endfor %}",
    "long range": "{{ range(1000000) | length }}",
    "set": "{% set x = 1 %}{% set a, b = (2, 3) %}{% set c = 1, 2 %}{{ x }}{{ a }}{{ b }}{{ c }}",
    "set block": "{% set x %} a{{ n }} {% endset %}[{{ x }}]{% set y | trim | upper %} b {% endset %}[{{ y }}]",
    "loop scope": "{% set x = 1 %}{% for i in l %}{% set x = x + i %}{{ x }} {% endfor %}{{ x }}",
    "if scope": "{% if true %}{% set x = 1 %}{% endif %}{{ x }}",
    "namespace": "{% set ns = namespace(a=1, b=[]) %}{% for i in l %}{% set ns.a = ns.a + i %}{% set ns.b = ns.b + [i] %}{% endfor %}{{ ns.a }} {{ ns.b }} {{ ns.c is defined }}{% set ns.c = 'x' %}{{ ns.c }}",
    "namespace of a dict": "{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a + ns.b }}",
    "namespace underscore": "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "set on no namespace": "{% set d.x = 1 %}",
    "with": "{% set x = 1 %}{% with x = 2, y = x %}{{ x }}{{ y }}{% endwith %}{{ x }}",
    "filter block": "{% filter upper | trim %} abc {{ n }} {% endfilter %}",
    "macro": "{% macro f(a, b='B', c=none) %}{{ a }}-{{ b }}-{{ c }}{% endmacro %}[{{ f(1) }}] [{{ f(1, c=3) }}] [{{ f(b=2, a=1) }}] [{{ f() }}]",
    "macro defaults": "{% macro f(a, b=a ~ '!') %}{{ b }}{% endmacro %}{{ f('x') }}",
    "macro varargs": "{% macro f(a) %}{{ a }} {{ varargs }} {{ kwargs }}{% endmacro %}{{ f(1, 2, 3, k=4) }} {{ f(*[7, 8], **{'z': 9}) }}",
    "macro too many": "{% macro f(a) %}{% endmacro %}{{ f(1, 2) }}",
    "macro unknown keyword": "{% macro f(a) %}{% endmacro %}{{ f(b=2) }}",
    "macro sees the page": "{% set x = 1 %}{% macro f() %}{{ x }}{{ n }}{% set x = 5 %}{% endmacro %}{% set x = 2 %}{{ f() }}{{ x }}",
    "macro in a loop": "{% macro f(m) %}{{ m.role[0] }}{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}",
    "macro recursion": "{% macro f(k) %}{{ k }}{% if k > 0 %}{{ f(k - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
    "macro is text": "{% macro f() %} x {% endmacro %}{{ f() | trim ~ '|' }}{{ f() | length }} {{ f.name }} {{ f is callable }}",
    "caller": "{% macro f(t) %}<{{ t }}>{{ caller() }}{{ caller() }}</{{ t }}>{% endmacro %}{% call f('b') %}x{{ n }}{% endcall %}",
    "caller with arguments": "{% macro f() %}{{ caller(1, b=2) }}{% endmacro %}{% call(a, b) f() %}{{ a }}:{{ b }}{% endcall %}",
    "cycler and joiner": "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}{% set j = joiner('; ') %}{% for x in l %}{{ j() }}{{ x }}{% endfor %}",
    "dict()": "{{ dict(a=1, b=2) }} {{ dict({'x': 1}, y=2) }} {{ dict([('a', 1)]) }}",
    "raise": "{{ raise_exception('No way: ' ~ n) }}",
    "strftime_now": "{{ strftime_now('%Y-%m-%d %H:%M:%S %d %b %B %A %j %y %p %%') }}",
    "not callable": "{{ n() }}",
    "include": "{% include 'x' %}",
    # JSON
    "tojson": "{{ tools | tojson }}|{{ d | tojson }}|{{ odd | tojson }}|{{ none | tojson }} {{ true | tojson }} {{ 1.0 | tojson }} {{ floats | tojson }}",
    "tojson indent": "{{ tools[0] | tojson(indent=2) }}|{{ {'a': [], 'b': {}} | tojson(indent=4) }}|{{ l | tojson(indent=0) }}",
    "tojson options": "{{ d | tojson(ensure_ascii=true, sort_keys=true) }} {{ tools[0].function.description | tojson(true) }} {{ l | tojson(separators=(',', ':')) }} {{ odd | tojson(ensure_ascii=true) }}",
    "tojson of keys": "{{ {1: 2, none: 3, true: 4, 1.5: 5} | tojson }} {{ (1, 2) | tojson }}",
    "tojson of undefined": "{{ nope | tojson }}",
    "tojson of a generator": "{{ l | map('string') | tojson }}",
    "tojson unknown option": "{{ l | tojson(color=1) }}",
    "order of keys": "{{ messages[2].tool_calls[0].function.arguments | tojson }} {{ messages[2].tool_calls[0].function.arguments }}",
    # Filters
    "default": "{{ nope | default('x') }} {{ none | default('x') }} {{ '' | default('x', true) }} {{ nope | d }} {{ nope | default(l) }}",
    "length": "{{ s | length }} {{ 'é👩‍👩‍👧' | length }} {{ l | count }} {{ d | length }}",
    "length of none": "{{ none | length }}",
    "length of a number": "{{ 3 | length }}",
    "case": "{{ 'straße İ ΑΣ' | upper }} {{ 'STRASSE ΑΣ' | lower }} {{ 'hello wORLD-foo (bar)' | title }} {{ 'hELLO' | capitalize }} {{ 1 | upper }}",
    "trim": "[{{ ws | trim }}] [{{ 'xxaxx' | trim('x') }}] [{{ 3 | trim }}]",
    "replace": "{{ s | replace('o', '0') }} {{ s | replace('o', '0', 1) }} {{ 'aa' | replace('', '-') }} {{ 1.5 | replace('.', ',') }}",
    "join": "{{ l | join }} {{ l | join(', ') }} {{ rows | join('/', attribute='k') }} {{ [1, none, 'a', 1.0] | join('|') }} {{ 'abc' | join('.') }}",
    "join none": "{{ none | join }}",
    "first and last": "{{ l | first }} {{ l | last }} {{ 'abc' | first }} {{ 'abc' | last }} [{{ [] | first }}] {{ d | first }} {{ l | map('string') | first }}",
    "list": "{{ 'abc' | list }} {{ d | list }} {{ range(3) | list }} {{ d.items() | list }} {{ l | reverse | list }} {{ 'abc' | reverse }}",
    "map": "{{ l | map('string') | list }} {{ rows | map(attribute='k') | list }} {{ rows | map(attribute='z', default='-') | list }} {{ words | map('upper') | join(',') }} {{ none | map('upper') | list }} {{ tools | map(attribute='function.name') | list }}",
    "select": "{{ l | select('odd') | list }} {{ l | reject('gt', 1) | list }} {{ [0, 1, ''] | select | list }} {{ words | select('in', ['fig']) | list }}",
    "selectattr": "{{ rows | selectattr('v', 'gt', 1) | map(attribute='k') | list }} {{ rows | rejectattr('k', 'equalto', 'x') | list | length }} {{ messages | selectattr('role', '==', 'user') | list | length }} {{ rows | selectattr('zzz') | list }} {{ messages | selectattr('tool_calls', 'defined') | list | length }}",
    "sort": "{{ l | sort }} {{ l | sort(reverse=true) }} {{ words | sort }} {{ words | sort(case_sensitive=true) }} {{ rows | sort(attribute='v', reverse=true) | map(attribute='k') | list }}",
    "sort of kinds": "{{ [1, 'a'] | sort }}",
    "dictsort": "{{ d | dictsort }} {{ {'b': 1, 'A': 2} | dictsort(true) }} {{ {'b': 1, 'a': 2} | dictsort(by='value', reverse=true) }}",
    "unique": "{{ words | unique | list }} {{ [1, 1.0, true, 2] | unique | list }}",
    "min, max, sum": "{{ l | min }} {{ l | max }} {{ l | sum }} {{ words | max }} {{ rows | sum(attribute='v') }} {{ [0.1, 0.2] | sum }} [{{ [] | max }}]",
    "groupby": "{% for g in rows | groupby('k') %}{{ g.grouper }}:{{ g.list | length }} {% endfor %}{% for k, v in rows | groupby('k') %}{{ k }}{% endfor %}",
    "batch and slice": "{{ range(7) | batch(3) | list }} {{ range(4) | batch(3, 'x') | list }} {{ range(7) | slice(3) | list }} {{ range(4) | slice(3, '-') | list }}",
    "numbers": "{{ '42' | int }} {{ 'x' | int }} {{ '0x1f' | int(base=16) }} {{ 3.9 | int }} {{ '3.9' | int }} {{ 'x' | int(-1) }} {{ '1.5' | float }} {{ none | float }} {{ -3 | abs }} {{ 2.567 | round(2) }} {{ 2.5 | round }} {{ 3.5 | round }} {{ 7 | round }} {{ 2.1 | round(method='ceil') }} {{ 1 | float }}",
    "string": "{{ 1.0 | string ~ none | string ~ true | string ~ l | string }}",
    "safe": "{{ ('<a>' | safe) + '<b>' }} {{ '<a>' | safe | upper }} {{ '<' | e }} {{ '<' | safe | e }} {{ ('%s' | safe) % '<' }} {{ ('<' | safe) ~ '>' }} {{ [('a' | safe)] }}",
    "indent": "{{ 'a\nb\n\nc' | indent }}|{{ 'a\nb' | indent(2, true) }}|{{ 'a\n\nb' | indent('> ', blank=true) }}",
    "format": "{{ '%s-%s' | format(1, 'x') }} {{ '%(a)s' | format(a=2) }}",
    "attr": "[{{ messages[0] | attr('role') }}]",
    "truncate and center": "{{ 'one two three four' | truncate(9) }} {{ 'one two three four' | truncate(9, true, '…') }} [{{ 'ab' | center(7) }}] [{{ 'abc' | center(6) }}]",
    "unknown filter": "{{ 1 | frobnicate }}",
    "filter with wrong arguments": "{{ l | length(1) }}",
    # Tests
    "tests of kinds": "{% for x in [1, 1.5, 'a', none, true, l, d, (1,), nope, range(2)] %}{{ x is string }}{{ x is number }}{{ x is integer }}{{ x is float }}{{ x is boolean }}{{ x is none }}{{ x is mapping }}{{ x is sequence }}{{ x is iterable }}{{ x is defined }}{{ x is true }}{{ x is false }} {% endfor %}",
    "tests": "{{ 3 is odd }} {{ 3 is even }} {{ 9 is divisibleby 3 }} {{ 9 is divisibleby(2) }} {{ 'a' is in 'abc' }} {{ 1 is eq 1 }} {{ 2 is gt 1 }} {{ 'a' is lower }} {{ 'A' is upper }} {{ n is not string }} {{ nope is undefined }} {{ none is sameas none }} {{ 'trim' is filter }} {{ 'odd' is test }} {{ 'x' is equalto 'x' and not false }}",
    "unknown test": "{{ 1 is frobnicated }}",
    # Methods
    "strip": "[{{ ws.strip() }}] [{{ ws.lstrip() }}] [{{ ws.rstrip() }}] [{{ 'xyaxy'.strip('yx') }}] [{{ 'abc'.rstrip('c').lstrip('a') }}]",
    "split": "{{ 'a,b,,c'.split(',') }} {{ ws.split() }} {{ 'a b  c d '.split(none, 1) }} {{ 'a-b-c'.split('-', 1) }} {{ 'a-b-c'.rsplit('-', 1) }} {{ ' a b  c '.rsplit(none, 1) }} {{ ''.split() }} {{ ''.split(',') }} {{ '</think>x</think>y'.split('</think>')[-1] }} {{ 'a-b'.split('-', maxsplit=1) }}",
    "split at nothing": "{{ 'a'.split('') }}",
    "splitlines": "{{ 'a\nb\r\nc\n\nd\n'.splitlines() }} {{ 'a\nb'.splitlines(true) }} {{ ''.splitlines() }}",
    "partition": "{{ 'a=b=c'.partition('=') }} {{ 'a=b=c'.rpartition('=') }} {{ 'abc'.partition('=') }} {{ 'abc'.rpartition('=') }}",
    "prefixes": "{{ s.startswith('He') }} {{ s.endswith(('x', 'ld')) }} {{ s.startswith('W', 6) }} {{ s.removeprefix('Hello ') }} {{ s.removesuffix('x') }}",
    "searches": "{{ s.find('o') }} {{ s.rfind('o') }} {{ s.find('z') }} {{ 'éa'.find('a') }} {{ s.index('W') }} {{ s.count('l') }} {{ s.find('o', 5) }} {{ s.count('l', 0, 4) }}",
    "index of nothing": "{{ s.index('z') }}",
    "cases": "{{ 'ßaB cD'.upper() }} {{ 'AB'.lower() }} {{ \"they're bill's\".title() }} {{ 'hELLO wORLD'.capitalize() }} {{ 'aB'.swapcase() }} {{ 'ß'.title() }} {{ 'Aß'.casefold() }}",
    "kinds of characters": "{{ 'a1'.isalnum() }} {{ 'ab'.isalpha() }} {{ '12'.isdigit() }} {{ ' '.isspace() }} {{ ''.isspace() }} {{ 'a b'.islower() }} {{ 'A1'.isupper() }} {{ 'é'.isascii() }} {{ '1'.isdecimal() }}",
    "padding": "[{{ 'a'.center(4) }}] [{{ 'ab'.center(5, '*') }}] [{{ 'a'.ljust(3, '.') }}] [{{ 'a'.rjust(3) }}] [{{ '-4'.zfill(4) }}] [{{ 'a\tb'.expandtabs(4) }}]",
    "join method": "{{ ', '.join(['a', 'b']) }} {{ ''.join([]) }} {{ '-'.join('abc') }}",
    "join of numbers": "{{ ', '.join([1]) }}",
    "replace method": "{{ s.replace('l', 'L') }} {{ s.replace('l', 'L', 2) }} {{ 'ab'.replace('', '.') }}",
    "format method": "{{ '{} {} {}'.format(1, 'a', none) }} {{ '{0}{1}{0}'.format('a', 'b') }} {{ '{x} {y[k]} {z[0]}'.format(x=1, y={'k': 2}, z=[3]) }} {{ '{:>5}|{:<5}|{:^5}|{:*^7}|{:05d}|{:,}|{:.2f}|{:x}|{!r}'.format('a', 'b', 'c', 'd', 42, 1234567, 2.345, 255, 'q') }} {{ '{{}}'.format() }} {{ '{:{w}}|'.format('a', w=4) }} {{ '{:.3}|{:e}|{:g}|{:%}'.format('abcdef', 1234.5, 0.0001, 0.25) }}",
    "format lacks": "{{ '{} {}'.format(1) }}",
    "dict methods": "{{ d.keys() | list }} {{ d.values() | list | length }} {% for k, v in d.items() %}{{ k }}{% endfor %} {{ d.copy() == d }} {{ 'b' in d.keys() }}",
    "list methods": "{{ l.index(2) }} {{ l.count(3) }} {{ (1, 1).count(1) }}",
    "no such method": "{{ s.frobnicate() }}",
    # Conversations
    "whole conversation": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% elif m.content is defined %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning is defined }};{% endfor %}",
    "null fields": "{{ messages[4].name is defined }} {{ 'name' in messages[4] }} {{ messages[2].content is defined }}",
    "tools and documents": "{{ tools is none }} {{ tools | length }} {{ documents[0].title }} {{ enable_thinking }} {{ nope is defined }}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ unk_token is defined }}",
    "whole messages": "{{ messages }}{{ messages | tojson }}",
}

CONTINUED = {
    "continue": ("{% for m in messages %}[{{ m.content }}]{% endfor %}", "So "),
    "continue trimmed": ("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", "So \n"),
    "continue parts": ("{% for m in messages %}[{% for p in m.content %}{{ p.text }}{% endfor %}]{% endfor %}", [{"type": "text", "text": "a "}]),
    "continue what is not shown": ("{{ messages[0].content }}", "So"),
    "continue without content": ("{% for m in messages %}{{ m.text }}{% endfor %}", "So"),
    "continue nothing": ("{% for m in messages %}[{{ m.content }}]{% endfor %}", None),
}


class FrozenDatetime(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(NOW, datetime.timezone.utc).replace(tzinfo=None)


def render(tokenizer, template, case):
    try:
        text = tokenizer.apply_chat_template(
            case["messages"],
            chat_template=template,
            tools=case["tools"],
            documents=case["documents"],
            add_generation_prompt=case["add_generation_prompt"],
            continue_final_message=case["continue_final_message"],
            tokenize=False,
            **case["variables"],
        )
        return {"text": text}
    except Exception as error:
        print(f"  {type(error).__name__}: {error}"[:100])
        return {"error": True}


def main():
    chat_template_utils.datetime = FrozenDatetime
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **special)
    lines = [{"defaults": CONVERSATION, "special": special, "now": NOW}]
    for name, template in CASES.items():
        print(name)
        lines.append({"name": name, "template": template, **render(tokenizer, template, CONVERSATION)})
    for name, (template, content) in CONTINUED.items():
        messages = [CONVERSATION["messages"][1], {"role": "assistant", "content": content}]
        if isinstance(content, list):
            messages = [{"role": "user", "content": content}, messages[1]]
        changed = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
        case = {**CONVERSATION, **json.loads(json.dumps(changed))}
        print(name)
        lines.append({"name": name, "template": template, **changed, **render(tokenizer, template, case)})
    for name, tools in {"no tools": None, "empty tools": []}.items():
        template = "{{ tools is none }}{{ tools is defined }}{{ tools }}{{ 'x' if tools else 'y' }}"
        case = {**CONVERSATION, "tools": tools}
        lines.append({"name": name, "template": template, "tools": tools, **render(tokenizer, template, case)})
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (HERE / "data" / "templates.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
