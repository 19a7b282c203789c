"""OpenAI's Responses API over chat completions: requests, answers as items and events, stored responses."""
