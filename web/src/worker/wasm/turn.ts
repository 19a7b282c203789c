/** Calls of `turn` that wait; one channel serves all of them. */
const waiting: (() => void)[] = [];
let channel: MessageChannel | null = null;

/**
 * Lets whatever waits in the event loop have its turn. Timers would do, but browsers hold them back for 4 ms.
 */
export function turn(): Promise<void> {
  if (typeof setImmediate === "function") return new Promise((resolve) => setImmediate(resolve));
  if (!channel) {
    channel = new MessageChannel();
    channel.port1.onmessage = () => waiting.shift()?.();
  }
  const { port2 } = channel;
  return new Promise((resolve) => {
    waiting.push(resolve);
    port2.postMessage(null);
  });
}
