"""Chat templates that use everything that the web engine supports, and a hypothesis strategy that varies
them.
"""
# ruff: noqa: E501 (a template is easier to read in one line)

EACH = "{%% for m in messages %%}[%s]{%% endfor %%}"
SNIPPETS = [
    *(EACH % f"{{{{ m.content{call} }}}}" for call in (
        "", ".strip()", ".strip('\\n')", ".lstrip('\\n')", ".rstrip('\\n')", ".strip(' \\n\\t')", ".lstrip()",
        ".rstrip()", "|trim", "|trim('\\n ')", ".split()", ".split('\\n')", ".split(' ', 1)", ".split(None, 1)",
        ".rsplit(None, 1)", ".rsplit(' ', 1)", ".splitlines()", ".partition(' ')", ".rpartition('i')",
        ".removeprefix('<b>')", ".removesuffix('İ')", ".upper()", ".lower()", ".title()", ".capitalize()",
        "|title", "|capitalize", "|upper", "|lower", ".replace('i', 'I')", ".replace('e', '', 1)", ".replace('', '-')",
        "|replace('i', 'é')", "|replace('i', 'é', 1)", ".find('i')", ".rfind('i')", ".count('i')", "[0]", "[-1]",
        "[2:5]", "[::-1]", "[-3:]", "[:-2]", "|length", "|reverse", "|list", "|first", "|last", "|tojson", "|string",
        "|e", "|escape", "|safe", "|indent(2)", "|indent(2, true)", "|indent('> ', false, true)",
        ".startswith('<')", ".endswith(('x', 'İ'))", ".isdigit()", ".isalpha()", ".isspace()", ".isupper()", ".islower()",
        "|int", "|float", "|int(7)", "|default('x')",
        "|d('x', true)", "*2", " ~ 1 ~ none ~ true ~ 1.5", " in 'Be brief 12'", "|map('upper')|join",
        "|unique|list", "|sort|join", "|max", "|min",
    )),
    "{{ messages }}", "{{ messages[1:3] }}", "{{ messages[0].items() }}", "{{ messages[0].keys() }}",
    "{{ messages[0].values()|list }}", "{{ messages[0]|items|list }}", "{{ messages[0]|dictsort }}",
    "{{ tools }}{{ tools|tojson }}{{ tools|tojson(indent=2) }}{{ tools|tojson(ensure_ascii=True) }}",
    "{{ tools|tojson(sort_keys=true, separators=(',', ':')) }}{{ {}|tojson(indent=1) }}{{ [[], {}]|tojson(indent=4) }}",
    "{{ messages[2].tool_calls|tojson }}{{ messages[2].tool_calls }}",
    "{% for k, v in messages[2].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }};{{ v|tojson }}{% endfor %}",
    "{% for k, v in messages[2].tool_calls[0].function.arguments|items %}{{ k }}={{ v is string }}{{ v is mapping }}"
    "{{ v is number }}{{ v is integer }}{{ v is float }}{{ v is boolean }}{{ v is iterable }}{{ v is sequence }}{% endfor %}",
    "{% for t in tools %}{% for n, p in t.function.parameters.properties.items() %}{{ n }}{{ p }}{% endfor %}{% endfor %}",
    "{{ true }} {{ none }} {{ 1.0 }} {{ [1, 'a', \"it's\", none] }} {{ ('x',) }} {{ () }} {{ {'a': {1: 2}} }} {{ 1e20 }} {{ 1e-5 }}",
    "{{ 1 == 1.0 }} {{ [1] == [1.0] }} {{ (1, 2) == [1, 2] }} {{ true == 1 }} {{ 'a' < 'b' }} {{ 1 < 2 < 3 }} {{ '\ufffd' < '👋' }}",
    "{{ -7 % 3 }} {{ -7 // 2 }} {{ 7 / 2 }} {{ 2 ** 3 ** 2 }} {{ -2 ** 2 }} {{ 7 % -3 }} {{ -7.5 % 2 }} {{ 7.5 // 2 }} {{ 1 + 2 ~ 3 }} {{ 2**64 }}",
    "{{ 10 / 5 }} {{ 3 * 1.5 }} {{ 0.1 + 0.2 }} {{ 1_000 }} {{ 0x1f }} {{ 1e3 }} {{ -1|abs }} {{ not 1 in [1] }} {{ 1 in [1] and 2 not in [1] }}",
    "{{ 2.5|round }} {{ 3.5|round }} {{ 1.25|round(1) }} {{ 2.675|round(2) }} {{ 7|round }} {{ 1234.5|round(-2) }} {{ 1.21|round(1, 'ceil') }} {{ 42.55|round|int }}",
    "{{ '%s' % 1 }} {{ '%s-%d' % ('a', 2) }} {{ '%.2f|%r|%i|%f|%%' % (1.5, 'é', 3.9, 2.5) }} {{ '%s %s'|format(1, none) }} {{ '%.1f' % 0.25 }} {{ '%(a)s' % {'a': 1} }}",
    "{{ [1, true, 'a', 1.0].count(1) }}{{ ('a', 'b').index('b') }}{{ messages.index(messages[1]) }}{{ [[1]].count([1.0]) }}{{ 'aé😀é'.index('😀') }}{{ (1, 2).count('a') }}",
    "{{ [1].index(2) }}", "{{ 'a'.index('b') }}",
    "{{ '{} {}'.format(1, 'a') }} {{ '{1}{0}{x}{{'.format(1, 2, x=3) }} {{ ', '.join(['a', 'b']) }}",
    "{% for m in messages %}{% if m == messages[-1] %}LAST{% endif %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}"
    "{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem.role }}{{ loop.nextitem.role if loop.nextitem is defined }}"
    "{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}{{ loop.depth }}{% endfor %}".replace("loop.previtem.role", "loop.previtem.role if loop.previtem"),
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{{ m.role }}{{ loop.last }}{% else %}none{% endfor %}",
    "{% for m in messages if m.role == 'x' %}{% else %}none{% endfor %}",
    "{% set ns = namespace(found=false) %}{% for m in messages if not ns.found %}{{ m.role }}{% if m.role == 'user' %}{% set ns.found = true %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{% if loop.index == 4 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{% set x = 1 %}{% for m in messages %}{{ x }}{% set x = x + 1 %}{{ x }}{% endfor %}{{ x }}",
    "{% set ns = namespace(n=0, items='i') %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}{% endfor %}{{ ns.n }}{{ ns.items }}{{ ns.missing is defined }}",
    "{% macro m(a, b=2, c='x') %}<{{ a }}{{ b }}{{ c }}{{ messages|length }}>{% endmacro %}{{ m(1) }}{{ m(1, c=3) }}{{ m(b=1, a=2)|upper }}{{ m() }}",
    "{% macro m() %}({{ caller('z') }}){% endmacro %}{% call(x) m() %}in {{ x }}{% endcall %}",
    "{% filter upper|replace('A', 'b') %}a{% set q = 1 %}{{ 'c' }}{% endfilter %}{{ q is defined }}",
    "{% set b %} a {{ 1 }} {% endset %}[{{ b }}]{% set c | trim | upper %} x {% endset %}[{{ c }}]",
    "{% with a = 1, b = 2 %}{{ a + b }}{% set z = 3 %}{% endwith %}{{ z is defined }}",
    "{% set a, b = 1, 'x' %}{{ a }}{{ b }}{% set (c, d) = [1, 2] %}{{ c }}{% for k, (x, y) in [(1, (2, 3))] %}{{ k }}{{ x }}{{ y }}{% endfor %}",
    "{% for a in [[1, [2]], [3]] recursive %}({{ a if a is number else loop(a) }}{{ loop.depth }}){% endfor %}",
    "a\n  {% if true %}  \n b\n  {%- if true %} c {% endif -%} \n d {%+ if true %}e{% endif +%}\n  {# x #}\n f {{- 'g' -}} \n h{% raw %} {{ x }}\n{% endraw %}\ni{% endif %}\n",
    "{% for m in messages %}\r\n{{ m.role }}\r\n{% endfor %}\r\nx\ry\r\n", "x\n\n", "{{ 'a\\n\\t\\x41\\u00e9\\q\\101' \"b\" }}", "{{ 'a\r\nb'|length }}",
    "{% if false %}{% elif messages %}b{% else %}c{% endif %}{{ 'x' if false }}{{ (1 if true else 2) + 1 }}",
    "{{ x is defined }}{{ x }}{{ x|default('d') }}{{ x is none }}{{ none is none }}{{ x|length }}{% for y in x %}{% endfor %}{{ x ~ 'a' }}{{ x == y }}{{ 'a' in x }}",
    "{{ x.y }}", "{{ x['y'] }}", "{{ x() }}", "{{ x + 1 }}", "{{ none + 'a' }}", "{{ 'a' + 1 }}", "{{ none|length }}", "{{ none.x is defined }}", "{{ messages.x is defined }}{{ messages[99] is defined }}{{ 'abc'[9] is defined }}",
    "{{ 1 / 0 }}", "{{ x < 1 }}", "{{ raise_exception('no: ' ~ messages|length) }}", "{{ x|foo }}", "{{ 1 is foo }}", "{{ messages|join('a', 'role', 3) }}",
    "{{ messages|map(attribute='role')|join(', ') }}{{ messages|map(attribute='none', default='x')|list }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}"
    "{{ messages|rejectattr('tool_calls', 'defined')|map(attribute='content.0')|list }}{{ messages|selectattr('tool_calls')|list|length }}{{ [1, 2, 3]|select('odd')|list }}{{ [0, 1]|reject|list }}",
    "{% if messages|selectattr('role', 'equalto', 'nobody') %}always{% endif %}", "{{ messages|selectattr('role')|length }}",
    "{{ [3, 1, 2]|sort }}{{ ['b', 'A', 'c']|sort }}{{ ['b', 'A']|sort(case_sensitive=true) }}{{ messages|sort(attribute='role,content')|map(attribute='role')|list }}{{ [1, 2]|sort(reverse=true) }}",
    "{{ [3, 1]|max }}{{ [3, 1]|min }}{{ []|max is defined }}{{ [1, 2.5]|sum }}{{ messages|sum(attribute='n') if false }}{{ ['a', 'A', 'b']|unique|list }}{{ [1, 2, 3]|last }}{{ [1, 2, 3]|first }}{{ []|first is defined }}",
    "{{ range(3) }}{{ range(1, 10, 3)|list }}{{ range(5, 0, -2)|list }}{{ range(3)[1] }}{{ range(4)|length }}{{ 2 in range(3) }}",
    "{{ dict(a=1, b=2) }}{{ dict({'x': 1}) }}{{ {'a': 1, 'b': none}.get('b', 2) }}{{ {'a': 1}.get('c') }}{{ {'a': 1}.get('c', 'd') }}{{ {'items': 1}.items is defined }}{{ {'items': 1}['items'] }}",
    "{% set j = joiner(' | ') %}{% for m in messages %}{{ j() }}{{ m.role }}{% endfor %}",
    "{{ messages[0]|attr('role') is defined }}{{ messages|length is divisibleby 2 }}{{ messages|length is even }}{{ 3 is odd }}{{ 'a' is in 'abc' }}{{ 1 is eq 1.0 }}{{ none is sameas none }}{{ 'A' is upper }}",
    "{{ [1, 2] + [3] }}{{ [1] * 3 }}{{ 'ab' * 2 }}{{ (1,) + (2,) }}{{ [1, 2, 3][::-1] }}{{ [1, 2, 3, 4][1:-1] }}",
    "{{ [1].append(2) }}", "{{ {'a': 1}.update({'b': 2}) }}", "{{ messages[2].tool_calls[0].function.arguments.keys()|list }}", "{{ '5'|int + 1 }}{{ '5.7'|int }}{{ ' 7 '|int }}{{ 'x'|int }}{{ 3.9|int }}{{ none|int }}{{ true|int }}{{ '1e3'|float }}{{ 'inf'|float }}",
    "{{ 'a' 'b' }}{{ {'a': 1,} }}{{ [1,] }}{{ 'x'.upper().lower() }}{{ 'x' is string }}{{ messages is iterable }}{{ 1.0 is float }}{{ true is boolean }}{{ true is number }}{{ 'ab'|list|tojson }}",
    "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ add_generation_prompt }}", "{{ 'a'|tojson|safe }}{{ '<'|e ~ '>' if false }}", "{{ messages|tojson|length }}", "{{ 1.0|tojson }}{{ [1.5, 1e100, -0.0]|tojson }}",
    "{{ '5' in '15' }}{{ none == false }}{{ '' == none }}{{ 0 == false }}{{ {} == {} }}{{ {'a': 1, 'b': 2} == {'b': 2, 'a': 1} }}",
]  # fmt: skip

NAMES = (
    "messages",
    "m",
    "m.content",
    "m.role",
    "tools",
    "x",
    "n",
    "ns.v",
    "bos_token",
    "m.tool_calls",
    "loop.index",
)
CONSTANTS = (
    "0", "1", "-3", "7", "2.0", "0.5", "12345678901234567890", "true", "none", "''", "'a'", "' b\\n'", "'é👋'", "[]", "{}",
    "[1, 'a']", "(1, none)", "{'a': 1, '1': 2.0}",
)  # fmt: skip
UNARY = (
    "-({a})", "not {a}", "({a})|trim", "({a})|length", "({a})|string", "({a})|upper", "({a})|tojson", "({a})|list",
    "({a})|first", "({a})|last", "({a})|int", "({a})|float", "({a})|round", "({a})|sort", "({a})|default('d', true)",
    "({a})|join(',')", "({a})|reverse|list", "({a})|replace('a', 'bb')", "({a})|items|list", "({a})|dictsort", "({a})|abs",
    "({a})|title", "({a})|capitalize", "({a})|indent", "({a})|unique|list", "({a})|max", "({a})|sum", "({a})|map('string')|list",
    "({a}).strip()", "({a}).split('a')", "({a}).split()", "({a}).keys()|list", "({a}).get('a')", "({a}).lstrip(' \\n')",
    "({a}).splitlines()", "({a})[0]", "({a})[-1]", "({a})['a']", "({a}).a", "({a})[1:]", "({a})[::-1]", "({a})[:-1]",
    "({a}) is defined", "({a}) is none", "({a}) is string", "({a}) is mapping", "({a}) is iterable", "({a}) is number",
    "({a}) is sequence", "({a}) is integer", "({a}) is boolean", "({a}) is true", "[{a}, 1]", "{{'k': {a}}}", "({a},)",
    "('%s' % ({a},))", "'{{}}'.format({a})", "range({a})|list", "({a})|e",
)  # fmt: skip
BINARY = (
    "({a} + {b})", "({a} - {b})", "({a} * {b})", "({a} / {b})", "({a} // {b})", "({a} % {b})", "({a} ~ {b})", "({a} == {b})",
    "({a} != {b})", "({a} < {b})", "({a} >= {b})", "({a} in {b})", "({a} not in {b})", "({a} and {b})", "({a} or {b})",
    "({a} if {b} else 'no')", "({a})|default({b})", "({a})[{b}]", "({a})|join({b})", "({a}).startswith({b})",
    "{a} + {b} ~ {a}", "{a} * {b} - {b} // 2", "-{a} ** 2", "not {a} in {b}", "{a}|string + {b}|string", "({a})|select('eq', {b})|list",
)  # fmt: skip
STATEMENTS = (
    "{{{{ {a} }}}}", " \n  {{%- if {a} -%}} y \n{{% else %}}\n n {{%- endif %}}\n", "{{% for x in {a} %}}{{{{ x }}}};{{% endfor %}}",
    "  {{% set x = {a} %}}\n{{{{ x }}}}", "{{% set ns.v = {a} %}}{{{{ ns.v }}}}", "{{% for x in {a} if {b} %}}{{{{ loop.index ~ loop.last }}}}{{% else %}}-{{% endfor %}}",
    "{{% set b %}}{{{{ {a} }}}} {{% endset %}}{{{{ b|trim }}}}", "\r\n{{#- c -#}}\t{{%+ if {a} %}}\n{{% endif +%}} \n",
    "{{% for k, v in ({a})|items %}}{{{{ k }}}}{{{{ v }}}}{{% endfor %}}", "{{% filter upper %}}{{{{ {a} }}}}{{% endfilter %}}",
)  # fmt: skip
