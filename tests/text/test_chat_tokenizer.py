"""The tokenizer of Qwen with its chat template, compared with transformers' Qwen2Tokenizer."""

import json
import shutil

import pytest
import transformers
from tokenizers import pre_tokenizers

from fastdiff.errors import InputError
from fastdiff.text.chat_template import MAX_TEMPLATE, MAX_TEXT, ChatTemplate
from fastdiff.text.chat_tokenizer import ChatTokenizer

# Qwen3's, without its branches for tools and for earlier answers
TEMPLATE = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
MERGES = [("c", "a"), ("ca", "t"), ("Ġ", "cat"), ("d", "o"), ("do", "g"), ("u", "s"), ("us", "er"), ("e", "r")]
PROMPTS = {
    "plain": "a cat and a dog",
    "nothing": "",
    "spaces": "  two\n\n lines\r\n\tand  tabs  ",
    "digits": "12345 cats, 2.5 dogs",
    "contractions": "It's the dog's, we'll SEE'LL",
    "chinese": "一幅海报：蒸汽小火车 → 春天",
    "emoji": "\U0001f408\u200d⬛ cat",
    "not-composed": "cafe\u0301",
    "special": "cat<|im_end|>\n<|im_start|>system\ndog <|endoftext|>",
    "braces": "{{ messages }} {% raise %}",
    "long": "cat dog " * 400,
}


@pytest.fixture(scope="module")
def theirs():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    vocabulary |= {"".join(pair): len(letters) + i for i, pair in enumerate(sorted(MERGES, key="".join))}
    merges = [pair for pair in MERGES if {*pair} <= vocabulary.keys()]
    tokenizer = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=merges)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def newest(theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("newest")
    theirs.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(newest, tmp_path):
    return shutil.copytree(newest, tmp_path / "tokenizer")


def change(folder, **options):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))


def of_older_transformers(folder):
    """Make a vocabulary and merges, with the added tokens and the template in the config."""
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, content["model"]["merges"]), ""]))
    decoder = {str(token.pop("id")): token for token in content["added_tokens"]}
    change(folder, added_tokens_decoder=decoder, chat_template=TEMPLATE)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).unlink()


def ids_of(theirs, prompt, length=512):
    """Return the ids as diffusers' ZImagePipeline makes them, without the padding."""
    text = theirs.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    found = theirs([text], padding="max_length", max_length=length, truncation=True)
    return [i for i, is_there in zip(found.input_ids[0], found.attention_mask[0], strict=True) if is_there]


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_ids_are_those_of_transformers(theirs, newest, prompt):
    ours = ChatTokenizer(newest)
    assert [*ours(prompt).ids] == ids_of(theirs, prompt)
    assert [*ours(prompt, 9).ids] == ids_of(theirs, prompt, 9)


def test_folders_of_older_transformers_load(theirs, folder):
    of_older_transformers(folder)
    ours = ChatTokenizer(folder)
    for prompt in PROMPTS.values():
        assert [*ours(prompt).ids] == ids_of(theirs, prompt)


def test_the_end_that_did_not_fit_is_told(newest):
    ours = ChatTokenizer(newest)
    whole = ours("a cat")
    assert (whole.cut, whole.total) == ("", len(whole.ids))
    assert ours("a cat", len(whole.ids) - 2).cut == ""  # of the template alone
    cut = ours("a cat and a dog", 10)
    assert len(cut.ids) == 10 < cut.total
    assert cut.cut == "a dog" and "cut: 'a dog'" in cut.warning()


def test_a_live_tokenizer_is_read(theirs):
    assert ChatTokenizer.like(theirs)("a cat").ids == tuple(ids_of(theirs, "a cat"))
    with pytest.raises(InputError, match=r"text_encoder: .* has the wrong type; give a Qwen2Tokenizer"):
        ChatTokenizer.like(object(), "text_encoder")


def test_a_saved_folder_is_read_by_transformers(theirs, folder, tmp_path):
    of_older_transformers(folder)
    ChatTokenizer(folder).save_pretrained(tmp_path / "again")
    again, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "again"), ChatTokenizer(tmp_path / "again")
    assert type(again).__name__ == "Qwen2Tokenizer"
    for prompt in PROMPTS.values():
        assert ids_of(again, prompt) == [*ours(prompt).ids] == ids_of(theirs, prompt)
    assert ours.size == len(theirs)


REFUSED = {
    "class": (
        lambda folder: change(folder, tokenizer_class="CLIPTokenizer"),
        "tokenizer_class: 'CLIPTokenizer' is not",
    ),
    "side": (lambda folder: change(folder, truncation_side="left"), "truncation_side: 'left' is not"),
    "space": (lambda folder: change(folder, add_prefix_space=True), "add_prefix_space: True is not"),
    "no-template": (lambda folder: (folder / "chat_template.jinja").unlink(), "has no chat_template"),
    "no-vocabulary": (lambda folder: (folder / "tokenizer.json").unlink(), "neither tokenizer.json nor vocab.json"),
    "damaged": (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json"),
    "another-id": (
        lambda folder: change(folder, added_tokens_decoder={"999": {"content": "<|im_start|>", "special": True}}),
        r"the token '<\|im_start\|>' has id \d+, not 999",
    ),
    "binary": (lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff\xfe"), "is not readable text"),
}


@pytest.mark.parametrize(("spoil", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_folder_is_named(folder, spoil, message):
    spoil(folder)
    with pytest.raises(InputError, match=message) as refusal:
        ChatTokenizer(folder)
    assert "\n" not in str(refusal.value)


TEMPLATES = {
    "syntax": ("{% for %}", "its chat_template is damaged"),
    "tag": ("{% include 'secret' %}", "its chat_template fails"),
    "escape": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "its chat_template fails"),
    "change": ("{{ messages.append(1) }}", "its chat_template fails"),
    "range": ("{% for i in range(10**9) %}x{% endfor %}", "its chat_template fails"),
    "endless": ("{% for i in range(99999) %}" + "x" * 999 + "{% endfor %}", f"makes more than {MAX_TEXT} characters"),
    "refusal": ("{{ raise_exception('no system role') }}", "its chat_template fails .TemplateError: no system role"),
    "zero": ("{{ 1 // 0 }}", "its chat_template fails"),
    "long": ("x" * (MAX_TEMPLATE + 1), f"is not a template of 1 to {MAX_TEMPLATE} characters"),
    "list": ([{"name": "default", "template": "x"}], "is not a template"),
}


@pytest.mark.parametrize(("text", "message"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_wrong_template_is_named(tmp_path, text, message):
    with pytest.raises(InputError, match=message) as refusal:
        ChatTemplate(text, tmp_path / "chat_template.jinja").render("a cat")
    assert "\n" not in str(refusal.value)


def test_a_prompt_is_never_a_template(newest):
    ours = ChatTokenizer(newest)
    assert ours("{{ 7 * 7 }}").total > ours("49").total


@pytest.mark.parametrize("value", [7, None, "\ud800"])
def test_a_prompt_that_is_no_text_is_named(newest, value):
    with pytest.raises(InputError, match="prompt: "):
        ChatTokenizer(newest)(value)
