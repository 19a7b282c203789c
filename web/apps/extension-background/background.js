import { grammars } from "./nearfar/grammars.js";
import { shareEngine } from "./nearfar/here.js";

const shared = shareEngine({ grammars });
addEventListener("message", ({ data, ports: [port] }) => data === "connect" && shared.connect(port));
