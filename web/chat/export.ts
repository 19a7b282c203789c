/** Exports chats as files. */

import { type Chat, titleOf } from "./chats.js";

export function toJson(chats: readonly Chat[]): string {
  return `${JSON.stringify({ format: "nearfar-chats", version: 1, chats }, null, 2)}\n`;
}

export function toMarkdown(chats: readonly Chat[]): string {
  return chats.map(oneToMarkdown).join("\n---\n\n");
}

function oneToMarkdown(chat: Chat): string {
  const turns = chat.turns.map(({ role, name, content, note, calls = [] }) => {
    const who = role === "user" ? "You" : (name ?? "Answer");
    const called = calls.flat().map((call) => `> ${call.name}(${call.arguments}) → ${call.result}\n\n`);
    return `## ${who}\n\n${called.join("")}${content}\n${note === undefined ? "" : `\n*${note}*\n`}`;
  });
  return `# ${titleOf(chat)}\n\n${new Date(chat.created).toISOString()}\n\n${turns.join("\n")}`;
}

/** Lets the browser save a text as a file. */
export function download(name: string, text: string, type: string): void {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  URL.revokeObjectURL(url);
}
