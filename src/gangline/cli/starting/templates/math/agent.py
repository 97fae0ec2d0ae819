"""An agent of one call: it asks the model to think in steps and to end with the number."""

import os
import sys

from openai import OpenAI

messages = [
    {"role": "system", "content": "Think in short steps. End with the result."},
    {"role": "user", "content": "What is 3 * 4 + 5?"},
    {"role": "assistant", "content": "3 * 4 = 12. 12 + 5 = 17. The result is 17"},
    {"role": "user", "content": sys.argv[1]},
]
reply = OpenAI().chat.completions.create(
    model=os.environ["OPENAI_MODEL"], messages=messages, temperature=0.7, max_tokens=48
)
print(reply.choices[0].message.content)
