/** What the cloud has cost, by conversation and by day, in the policy's unit (tokens or money). */

/** Conversations that are remembered; those used longest ago are forgotten first. */
export const REMEMBERED = 1000;

/** What a ledger keeps from start to start. */
export interface LedgerRecord {
  readonly day: string;
  readonly spent: number;
  readonly conversations: Readonly<Record<string, number>>;
}

/**
 * Costs are reserved before a call, at their most, and settled after it: calls at once cannot exceed a budget
 * together.
 *
 * Days are strings such as "2026-01-31"; a new one begins at 0. Reservations are no part of what is kept from
 * start to start.
 */
export class Ledger {
  #day = "";
  #spent = 0;
  #next = 1;
  readonly #conversations = new Map<string, number>();
  readonly #reserved = new Map<number, { readonly conversation: string | null; readonly cost: number }>();

  /** What the day has cost, reservations included. */
  spentDay(day: string): number {
    let sum = day === this.#day ? this.#spent : 0;
    for (const { cost } of this.#reserved.values()) sum += cost;
    return sum;
  }

  /** What a conversation has cost, reservations included; without an id: nothing yet. */
  spentConversation(conversation: string | null): number {
    if (conversation === null) return 0;
    let sum = this.#conversations.get(conversation) ?? 0;
    for (const reserved of this.#reserved.values())
      if (reserved.conversation === conversation) sum += reserved.cost;
    return sum;
  }

  /** Sets aside what a call may cost. Gives the number to settle it by. */
  reserve(conversation: string | null, cost: number): number {
    const number = this.#next++;
    this.#reserved.set(number, { conversation, cost });
    return number;
  }

  /** The call cost this much after all. A number that is settled already is ignored. */
  settle(number: number, day: string, cost: number): void {
    const reserved = this.#reserved.get(number);
    if (!reserved) return;
    this.#reserved.delete(number);
    if (day !== this.#day) {
      this.#day = day;
      this.#spent = 0;
    }
    this.#spent += cost;
    const { conversation } = reserved;
    if (conversation === null) return;
    const before = this.#conversations.get(conversation) ?? 0;
    // Deleted first, so that it is the one used last.
    this.#conversations.delete(conversation);
    this.#conversations.set(conversation, before + cost);
    const [oldest] = this.#conversations.keys();
    if (this.#conversations.size > REMEMBERED && oldest !== undefined) this.#conversations.delete(oldest);
  }

  record(): LedgerRecord {
    return { day: this.#day, spent: this.#spent, conversations: Object.fromEntries(this.#conversations) };
  }

  static restored(data: Partial<LedgerRecord>): Ledger {
    const made = new Ledger();
    made.#day = data.day ?? "";
    made.#spent = data.spent ?? 0;
    for (const [name, cost] of Object.entries(data.conversations ?? {})) made.#conversations.set(name, cost);
    return made;
  }
}
