/** Accounts of the cloud's costs, by conversation and by day, in the policy's unit (tokens or money). */

/** Conversations that are remembered; the least recently used are forgotten first. */
export const REMEMBERED = 1000;

/** The state of a ledger between visits. */
export interface LedgerRecord {
  readonly day: string;
  readonly spent: number;
  readonly conversations: Readonly<Record<string, number>>;
}

/**
 * Costs are reserved before a call, at their maximum, and settled after it, so that simultaneous calls cannot
 * exceed a budget together.
 *
 * Days are strings like "2026-01-31"; a new day begins at 0. Reservations are not kept between visits.
 */
export class Ledger {
  #day = "";
  #spent = 0;
  #next = 1;
  readonly #conversations = new Map<string, number>();
  readonly #reserved = new Map<number, { readonly conversation: string | null; readonly cost: number }>();

  /** The day's costs, reservations included. */
  spentDay(day: string): number {
    let sum = day === this.#day ? this.#spent : 0;
    for (const { cost } of this.#reserved.values()) sum += cost;
    return sum;
  }

  /** A conversation's costs, reservations included; 0 without an id. */
  spentConversation(conversation: string | null): number {
    if (conversation === null) return 0;
    let sum = this.#conversations.get(conversation) ?? 0;
    for (const reserved of this.#reserved.values())
      if (reserved.conversation === conversation) sum += reserved.cost;
    return sum;
  }

  /** Reserves the most that a call may cost. Returns the number for `settle`. */
  reserve(conversation: string | null, cost: number): number {
    const number = this.#next++;
    this.#reserved.set(number, { conversation, cost });
    return number;
  }

  /** Replaces a reservation by the call's actual cost. A number that is settled already is ignored. */
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
    // Deleted first, so that it becomes the most recently used one.
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
