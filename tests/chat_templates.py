"""Small chat templates, each written to behave as those of one family of models do."""

from itertools import groupby

from transformers import PreTrainedTokenizerFast

from eaglefeed.producer.masking import TokenizedChat
from tiny_target import END, tiny_tokenizer

QWEN3 = (
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- endif %}{%- set ns = namespace(last=messages | length - 1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- set content = m.content %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{%- elif m.role == 'assistant' %}"
    "{%- set thought = '' %}{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}"
    "{%- for c in m.tool_calls or [] %}{%- if loop.index0 or content %}{{- '\n' }}{%- endif %}"
    '{{- \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
    "{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
"""Keeps thinking behind the last user turn alone, puts an empty one there where there is none."""

LLAMA3 = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '\n\n' + system + '<|eot_id|>' }}"
    "{%- for m in messages %}{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{{- m['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
"""Writes BOS, a system turn with the day's date, and trims what people wrote."""

MISTRAL = (
    "{{- bos_token }}{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}"
    "{%- if m.role == 'user' %}{{- '[INST] ' + m.content | trim + ' [/INST]' }}"
    "{%- else %}{{- ' ' + m.content | trim + eos_token }}{%- endif %}{%- endfor %}"
)
"""No system role, strict alternation, no header of an answer."""

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""The assistant is called model, and there is no system."""

R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '<|Assistant|>' + m['content'].split('</think>')[-1] + eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
"""Opens the thinking in the prompt and takes it out of every answer, the last one too; drops system turns."""

PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
"""Closes every text with an end that is not the end of a turn."""

HARMONY = (
    "{{ '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if loop.last and m.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
"""Channels; the last answer has another end than earlier ones; thinking in the last alone."""

GLM = (
    "{{ '[gMASK]<sop>' }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""No end of turn; the header's line feed is the answer's."""

VICUNA = (
    "{{ 'A chat. ' }}{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
"""Roles that are plain text, and a header that ends in a blank."""

END_OF_TEXT_ALONE = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% if loop.last and m.role == 'assistant' %}"
    "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
"""An end behind the last answer, none behind earlier ones."""

TOOLS_AT_THE_LAST_USER = (
    "{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{%- if tools and m == users[-1] %}"
    "{{- '[TOOLS]' + tools | tojson + '[/TOOLS]' }}{%- endif %}"
    "{{- '[INST]' + m.content + '[/INST]' }}{%- elif m.role == 'tool' %}{{- '[RESULT]' + m.content | tojson }}"
    "{%- elif m.tool_calls %}{%- for c in m.tool_calls %}{%- if c.id | length != 9 %}"
    "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}{%- endfor %}"
    "{{- '[CALLS]' + m.tool_calls | map(attribute='function') | list | tojson + eos_token }}"
    "{%- else %}{{- m.content + eos_token }}{%- endif %}{%- endfor %}"
)
"""The tools stand before the last user turn, wherever that is; call ids have nine characters."""

RESULTS_NEED_A_CALL = (
    "{%- set ns = namespace(name='') %}{%- for m in messages %}{%- if m.tool_calls %}"
    "{%- set ns.name = m.tool_calls[0].function.name %}"
    "{{- '<|start|>assistant to=' + ns.name + '<|message|>' }}"
    "{{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
    "{%- elif m.role == 'tool' %}{%- if not ns.name %}"
    "{{- raise_exception('Message has tool role, but there was no previous assistant message with a tool call!') }}"
    "{%- endif %}{{- '<|start|>' + ns.name + '<|message|>' + m.content + '<|end|>' }}"
    "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
"""A result takes its name from the call before it, and is refused without one."""

FIRST_USER_ONLY = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Refuses what has no user turn, such as a conversation that is opened by the assistant, cut before its first user."""

TAGGED_THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}{{ '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Generation tags, and thinking in the last answer alone."""

MARKS = (
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|User|>",
    "<|Assistant|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>", "<|start|>", "<|channel|>",
    "<|message|>", "<|return|>", "</s>", "[gMASK]", "<sop>", "[INST]", "[/INST]",
)  # fmt: skip
"""Their special tokens."""


def family_tokenizer(template: str, eos: str = END) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with the families' special tokens as tokens of their own."""
    tokenizer = tiny_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.eos_token = eos
    return tokenizer


def supervised_spans(tokenizer: PreTrainedTokenizerFast, tokens: TokenizedChat) -> list[str]:
    """The text of each run of tokens with loss."""
    runs = groupby(zip(tokens.input_ids, tokens.loss_mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for has_loss, run in runs if has_loss]
