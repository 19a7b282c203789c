/** Pending calls of `turn`; one channel serves all of them. */
const waiting: (() => void)[] = [];
let channel: MessageChannel | null = null;

/** Lets pending events of the event loop run. Browsers delay timers by 4 ms, so a channel is used. */
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
